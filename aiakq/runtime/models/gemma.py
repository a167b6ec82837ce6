"""Gemma: Llama with scaled embeddings and norms that multiply by one plus their weight (arXiv:2403.08295)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, Rescale, Weights


class GemmaBuilder(DecoderBuilder):
    """What all generations of Gemma share."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        # Files of the first generation say gelu where the models were trained with its approximation.
        own = config.raw.get("hidden_activation") or config.activation
        super().__init__(replace(config, activation="gelu_pytorch_tanh" if own == "gelu" else str(own)), weights)
        bias = bool(config.raw.get("attention_bias", False))
        self.qkv_bias = self.output_bias = bias

    def norm_weight(self, name: str, width: int) -> Tensor:
        """One plus the stored weight, [width]."""
        return super().norm_weight(name, width).float() + 1

    def after_embedding(self) -> Rescale:
        """Times the root of the width, rounded as the activations are."""
        return self.ops.scaling(torch.tensor(self.config.hidden_size**0.5, dtype=self.ops.dtype).item())


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GemmaForCausalLM from ``weights``."""
    return GemmaBuilder(config, weights).build()
