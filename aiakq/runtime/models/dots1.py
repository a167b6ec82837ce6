"""dots.llm1: Qwen3's attention, and experts routed as in DeepSeek-V3."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.shared_experts import SharedExpertsBuilder


class Dots1Builder(SharedExpertsBuilder):
    """Dense layers, then layers with routed and shared experts; norms of query and key heads."""

    has_head_norms = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw["attention_bias"])


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Dots1ForCausalLM from ``weights``."""
    return Dots1Builder(config, weights).build()
