"""Mistral: Llama without biases, with a sliding window (ModelConfig.sliding_windows)."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, Weights


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """MistralForCausalLM from ``weights``."""
    return DecoderBuilder(config, weights).build()
