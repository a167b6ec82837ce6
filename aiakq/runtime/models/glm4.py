"""GLM-4 (GLM-4-9B, GLM-4-0414): a fused MLP, and interleaved rotary embedding of half of each head.

GLM-4-0414 also has norms of the outputs of attention and MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder, Names
from aiakq.runtime.models.decoder import Block, Decoder, DecoderLayer, Weights


class GlmBuilder(DecoderBuilder):
    """GLM-4-9B with transformers' tensor names."""

    rotates_parts = True
    names = Names(gate_up=("mlp.gate_up_proj",))

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = bool(config.raw.get("attention_bias", False))

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Return interleaved tables: adjacent elements are rotated together."""
        return replace(super().rotary_tables(rope), interleaved=True)


class Glm4Builder(GlmBuilder):
    """GLM-4-0414."""

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer with norms also after attention and MLP."""
        block = super().block(layer)
        assert isinstance(block, Block)
        block.after_attention = self.norm(self.layer_name(layer, "post_self_attn_layernorm"))
        block.after_mlp = self.norm(self.layer_name(layer, "post_mlp_layernorm"))
        return block


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GlmForCausalLM and Glm4ForCausalLM from ``weights``."""
    family = Glm4Builder if config.architecture == "Glm4ForCausalLM" else GlmBuilder
    return family(config, weights).build()
