"""Qwen3: Llama with RMS norms on every query and key head."""

from __future__ import annotations

from torch import Tensor

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.llama import WholeHeadsBuilder


class Qwen3Builder(WholeHeadsBuilder):
    """Llama with RMS norms on every query and key head."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))

    def head_norms(self, layer: int) -> tuple[Tensor, Tensor]:
        """Weights [D] of the two norms."""
        q_norm, k_norm = (
            self.weights.tensor(f"{self.at(layer, name)}.weight", self.config.head_dim)
            for name in (self.names.q_norm, self.names.k_norm)
        )
        return q_norm, k_norm


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Qwen3ForCausalLM from ``weights``."""
    return Qwen3Builder(config, weights).build()
