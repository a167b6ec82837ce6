"""Ministral: Mistral with windows in some layers (8B, 2024), or with queries scaled by position (Ministral 3)."""

from __future__ import annotations

import torch

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import ProjectionStep, QueryScales
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, Weights


class MinistralBuilder(DecoderBuilder):
    """Both generations."""

    def before_attention(self, layer: int) -> list[ProjectionStep]:
        """Return the scaling of queries beyond the original context, if the config has any."""
        rope = self.config.rope_of(layer)[1]
        beta, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
        if not beta or not original:
            return []
        positions = torch.arange(self.config.num_positions, dtype=torch.float32, device=self.ops.device)
        factors = 1 + float(beta) * torch.log1p(torch.floor(positions / float(original)))
        return [QueryScales(factors, self.qkv_widths()[0], self.ops)]


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """MinistralForCausalLM or Ministral3ForCausalLM from ``weights``."""
    return MinistralBuilder(config, weights).build()
