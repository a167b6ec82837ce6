"""Llama: RMS norms, rotary embedding, a gated MLP (Touvron et al. 2023, arXiv:2302.13971)."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, Weights


class LlamaBuilder(DecoderBuilder):
    """Llama, with biases as configured."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))
        self.mlp_bias = bool(config.raw.get("mlp_bias", False))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """LlamaForCausalLM from ``weights``."""
    return LlamaBuilder(config, weights).build()
