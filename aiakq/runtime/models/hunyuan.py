"""Hunyuan V1, dense and with experts: Llama with norms of heads after their rotation, a stretched rotary base, and a
shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiakq.formats.config_values import malformed
from aiakq.kernels.ops.routing import SoftmaxRouting
from aiakq.kernels.types import AttentionSpec, RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder, Names
from aiakq.runtime.models.decoder import MLP, Decoder, Weights
from aiakq.runtime.models.mixture import Mixture, size
from aiakq.runtime.models.qwen2_moe import gated


class HunyuanBuilder(DecoderBuilder):
    """The dense models."""

    has_head_norms = True
    names = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the parameters of attention."""
        return replace(super().attention_spec(layer), rotated_norms=True)

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Return the rotary tables.

        A "dynamic" scaling with ``alpha`` does not depend on the length of the text: it stretches the base once.
        """
        D = self.config.head_dim
        if rope["rope_type"] == "dynamic" and rope.get("alpha") and D > 2:
            base = rope["rope_theta"] * rope["alpha"] ** (D / (D - 2))
            others = {name: value for name, value in rope.items() if name == "partial_rotary_factor"}
            rope = {"rope_type": "default", "rope_theta": base, **others}
        return super().rotary_tables(rope)


class HunyuanMoeBuilder(HunyuanBuilder):
    """The models with experts in every layer, beside a shared one that every token uses."""

    def mlp(self, layer: int) -> MLP:
        """Return routed and shared experts. Raises ``model_malformed``."""
        config, prefix, width = self.config, self.layer_name(layer, "mlp"), self.config.intermediate_size
        names, routing = ("gate_proj", "up_proj", "down_proj"), SoftmaxRouting(self.top_k(layer), normalize=True)
        count = size(config.raw, "num_experts")
        mixture = Mixture(prefix, prefix, names, count, width, routing, router="gate.wg")
        sparse = mixture.build(config, self.weights)
        sparse.shared = gated(config, self.weights, f"{prefix}.shared_mlp", width)
        return sparse

    def top_k(self, layer: int) -> int:
        """Return the number of experts per token, of which files may have a list by layer."""
        stated = self.config.raw["moe_topk"]
        if not isinstance(stated, list):
            return size(self.config.raw, "moe_topk")
        if len(stated) < self.config.num_layers:
            raise malformed("moe_topk", stated, f"a number for each of {self.config.num_layers} layers")
        return size({"moe_topk": stated[layer]}, "moe_topk")


_BUILDERS: Mapping[str, type[HunyuanBuilder]] = {
    "HunYuanDenseV1ForCausalLM": HunyuanBuilder,
    "HunYuanMoEV1ForCausalLM": HunyuanMoeBuilder,
}


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """One of the architectures of ``_BUILDERS`` from ``weights``. Raises ``model_malformed``."""
    return _BUILDERS[config.architecture](config, weights).build()
