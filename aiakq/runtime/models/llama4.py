"""Llama 4, the text model: chunked attention in layers with rotary embedding, full attention in those without, and one
routed expert per token beside a shared one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.ops.parallel import REPLICATED
from aiakq.kernels.ops.routing import TopSigmoidRouting
from aiakq.kernels.types import AttentionSpec, RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.config.rope import rotated_layers
from aiakq.runtime.layers.activation import activation
from aiakq.runtime.layers.attention import ProjectionStep, QueryScales
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import MLP, Decoder, Weights
from aiakq.runtime.models.mixture import check_routing, fused_experts, separate_experts, size
from aiakq.runtime.models.qwen2_moe import gated


class Llama4Builder(DecoderBuilder):
    """Llama 4."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        raw = config.raw
        self.qkv_bias = self.output_bias = bool(raw.get("attention_bias", False))
        self.rotated = rotated_layers(raw, config.num_layers)
        step = raw.get("interleave_moe_layer_step") or 1
        named = raw.get("moe_layers")
        self.sparse = list(range(step - 1, config.num_layers, step)) if named is None else list(named)

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None in layers for which ``no_rope_layers`` is 0."""
        return super().rotary(layer) if self.rotated[layer] else None

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Return interleaved tables: adjacent elements are rotated together.

        Raises ``unsupported`` for a scaling that also multiplies queries and keys, before the norms of heads.
        """
        is_multiplied = rope.get("rope_type") in ("yarn", "longrope") and rope.get("attention_factor") != 1
        if is_multiplied and self.config.raw.get("use_qk_norm", True):
            what = f"The rotary scaling {rope['rope_type']} with an attention_factor in a {self.config.architecture}"
            hint = "The norms of heads undo the factor: set it to 1 in rope_parameters."
            raise error("unsupported", what=what, hint=hint)
        return replace(super().rotary_tables(rope), interleaved=True)

    def attention_spec(self, layer: int) -> AttentionSpec:
        """Return the parameters of attention, chunked in layers with rotary embedding."""
        chunk = self.config.raw.get("attention_chunk_size", 8192) if self.rotated[layer] else None
        return replace(super().attention_spec(layer), chunk_size=chunk)

    def head_norms(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Return weights [D] of ones for rotated heads.

        The model norms heads after the rotation, which is equivalent because a rotation preserves lengths.
        """
        if not (self.config.raw.get("use_qk_norm", True) and self.rotated[layer]):
            return None, None
        ones = torch.ones(self.config.head_dim, dtype=self.ops.dtype, device=self.ops.device)
        return ones, ones

    def before_attention(self, layer: int) -> list[ProjectionStep]:
        """Return the position-dependent scaling of queries, in layers without rotary embedding."""
        raw = self.config.raw
        if self.rotated[layer] or not raw.get("attn_temperature_tuning", True):
            return []
        positions = torch.arange(self.config.num_positions, dtype=torch.float32, device=self.ops.device)
        steps = torch.floor((positions + 1) / float(raw.get("floor_scale", 8192)))
        factors = torch.log1p(steps) * float(raw.get("attn_scale", 0.1)) + 1
        return [QueryScales(factors, self.qkv_widths()[0], self.ops)]

    def mlp(self, layer: int) -> MLP:
        """Return routed and shared experts, or a dense MLP with its own width."""
        config, raw, prefix = self.config, self.config.raw, self.layer_name(layer, "feed_forward")
        if layer not in self.sparse:
            return gated(config, self.weights, prefix, size(raw, "intermediate_size_mlp"))
        D, F, count = config.hidden_size, config.intermediate_size, size(raw, "num_local_experts")
        top_k = size(raw, "num_experts_per_tok")
        check_routing(top_k, count)
        act = activation(config.activation, self.ops)
        return SparseMLP(
            router=self.weights.dense(self.weights.tensor(f"{prefix}.router.weight", count, D), role=REPLICATED),
            experts=self.ops.experts(self._experts(prefix, count), act),
            count=count,
            routing=self.ops.routing(TopSigmoidRouting(top_k, self.ops.activation("sigmoid")), count),
            width=F,
            hidden=D,
            shared=gated(config, self.weights, f"{prefix}.shared_expert", F),
            weigh_inputs=True,
        )

    def _experts(self, prefix: str, count: int) -> list[tuple[LinearLayer, LinearLayer]]:
        """Return the layers of the experts: of two tensors [E, K, N], or of one per expert and projection, as quantized
        models have them."""
        D, F = self.config.hidden_size, self.config.intermediate_size
        if not self.weights.has(f"{prefix}.experts.gate_up_proj"):
            return separate_experts(self.weights, prefix, ("gate_proj", "up_proj", "down_proj"), count, (D, F))
        both = self.weights.tensor(f"{prefix}.experts.gate_up_proj", count, D, 2 * F)
        down = self.weights.tensor(f"{prefix}.experts.down_proj", count, F, D)
        return fused_experts(self.weights, both.mT, down.mT)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Llama4ForCausalLM from ``weights``, and the text part of Llama4ForConditionalGeneration."""
    return Llama4Builder(config, weights).build()
