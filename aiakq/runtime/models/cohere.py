"""Command R (Cohere): layer norms without biases, parallel blocks, interleaved rotary embedding, scaled logits.

Command R+ has layer norms of heads besides. Command R7B (Cohere 2) has sliding windows, except in every fourth layer,
which has no rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import ProjectionNorms, ProjectionStep
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, DecoderLayer, ParallelBlock, Rescale, Weights


class CohereBuilder(DecoderBuilder):
    """Command R."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Return a layer norm without a bias."""
        weight = self.weights.tensor(f"{name}.weight", width or self.config.hidden_size)
        return self.ops.layer_norm(weight, None, self.config.norm_eps)

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Return interleaved tables: adjacent elements are rotated together."""
        return replace(super().rotary_tables(rope), interleaved=True)

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None in the layers of Cohere 2 without a sliding window."""
        second = self.config.architecture == "Cohere2ForCausalLM"
        full = self.config.layer_kinds[layer] == "full_attention"
        return None if second and full else super().rotary(layer)

    def before_attention(self, layer: int) -> list[ProjectionStep]:
        """Return the layer norms of the heads of queries and keys, which have a weight [D] each."""
        config = self.config
        if not config.raw.get("use_qk_norm"):
            return []
        D, norms = config.head_dim, []
        for name, heads in ((self.names.q_norm, config.num_heads), (self.names.k_norm, config.num_kv_heads)):
            weights = self.weights.tensor(f"{self.layer_name(layer, name)}.weight", heads, D)
            norms += [self.ops.layer_norm(weight.contiguous(), None, config.norm_eps) for weight in weights]
        return [ProjectionNorms(norms, [D] * len(norms), self.ops)]

    def block(self, layer: int) -> DecoderLayer:
        """One layer."""
        norm = self.norm(self.layer_name(layer, "input_layernorm"))
        return ParallelBlock(norm, self.attention(layer), self.mlp(layer), self.ops.scaling())

    def after_head(self) -> Rescale:
        """Return the multiplier ``logit_scale``."""
        return self.ops.scaling(float(self.config.raw["logit_scale"]))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """CohereForCausalLM and Cohere2ForCausalLM from ``weights``."""
    return CohereBuilder(config, weights).build()
