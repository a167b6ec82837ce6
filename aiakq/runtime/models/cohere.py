"""Command R (Cohere): layer norms without biases, parallel blocks, heads rotated in neighbouring pairs, scaled logits.

Command R7B (Cohere 2) has windows but for every fourth layer, which has no rotary positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder, unsupported
from aiakq.runtime.models.decoder import Decoder, DecoderLayer, ParallelBlock, Rescale, Weights


class CohereBuilder(DecoderBuilder):
    """Command R."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))

    def norm(self, name: str, width: int | None = None) -> Norm:
        """A layer norm without a bias."""
        weight = self.weights.tensor(f"{name}.weight", width or self.config.hidden_size)
        return self.ops.layer_norm(weight, None, self.config.norm_eps)

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Neighbouring elements are rotated together."""
        return replace(super().rotary_tables(rope), interleaved=True)

    def rotary(self, layer: int) -> RotaryTables | None:
        """None in the layers of Cohere 2 without a window."""
        second = self.config.architecture == "Cohere2ForCausalLM"
        full = self.config.layer_kinds[layer] == "full_attention"
        return None if second and full else super().rotary(layer)

    def block(self, layer: int) -> DecoderLayer:
        """One layer."""
        norm = self.norm(self.at(layer, "input_layernorm"))
        return ParallelBlock(norm, self.attention(layer), self.mlp(layer), self.ops.scaling())

    def after_head(self) -> Rescale:
        """Times ``logit_scale``."""
        return self.ops.scaling(float(self.config.raw.get("logit_scale", 0.0625)))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """CohereForCausalLM and Cohere2ForCausalLM from ``weights``. Raises ``unsupported``."""
    if config.raw.get("use_qk_norm"):
        reason = "every head of its queries and keys has a layer norm of its own (use_qk_norm)"
        raise unsupported(config, reason)
    return CohereBuilder(config, weights).build()
