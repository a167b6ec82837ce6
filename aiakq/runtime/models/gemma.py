"""Gemma: Llama with scaled embeddings and norms that multiply by one plus their weight (arXiv:2403.08295)."""

from __future__ import annotations

from dataclasses import replace

import torch

from aiakq.kernels.ops.norm import Norm
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

    def norm(self, name: str, width: int | None = None) -> Norm:
        """RMS norm, times one plus the weight."""
        weight = self.weights.tensor(f"{name}.weight", width or self.config.hidden_size)
        return self.ops.rms_norm(weight.float() + 1, self.config.norm_eps)

    def after_embedding(self) -> Rescale:
        """Times the root of the width, rounded as the activations are."""
        return self.ops.scaling(torch.tensor(self.config.hidden_size**0.5, dtype=self.ops.dtype).item())


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GemmaForCausalLM from ``weights``."""
    return GemmaBuilder(config, weights).build()
