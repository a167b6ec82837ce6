"""Qwen3: Llama with RMS norms of query and key heads."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, Weights


class Qwen3Builder(DecoderBuilder):
    """Llama with RMS norms of query and key heads."""

    has_head_norms = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Qwen3ForCausalLM from ``weights``."""
    return Qwen3Builder(config, weights).build()
