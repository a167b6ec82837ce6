"""Seed-OSS: Llama with a switch of its own for the bias of the output projection."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.llama import LlamaBuilder


class SeedOssBuilder(LlamaBuilder):
    """Llama with biases as configured."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.output_bias = bool(config.raw["attention_out_bias"])


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """SeedOssForCausalLM from ``weights``."""
    return SeedOssBuilder(config, weights).build()
