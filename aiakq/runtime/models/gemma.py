"""Gemma: Llama with scaled embeddings and norms that multiply by one plus their weight (arXiv:2403.08295)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, Rescale, Weights


class GemmaBuilder(DecoderBuilder):
    """The common parts of all generations of Gemma."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        bias = bool(config.raw.get("attention_bias", False))
        self.qkv_bias = self.output_bias = bias

    def norm_weight(self, name: str, width: int) -> Tensor:
        """Return one plus the stored weight, [width]."""
        return super().norm_weight(name, width).float() + 1

    def after_embedding(self) -> Rescale:
        """Return the multiplier sqrt(hidden_size), rounded to the activation dtype."""
        return self.ops.scaling(torch.tensor(self.config.hidden_size**0.5, dtype=self.ops.dtype).item())


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GemmaForCausalLM from ``weights``."""
    # Configs say gelu, but the models were trained with its tanh approximation.
    name = "gelu_pytorch_tanh" if config.raw["hidden_act"] == "gelu" else config.raw["hidden_act"]
    return GemmaBuilder(replace(config, activation=name), weights).build()
