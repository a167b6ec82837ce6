"""Qwen2 and Qwen2.5: Llama with biases in the QKV projection."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, Weights


class Qwen2Builder(DecoderBuilder):
    """Llama with biases in the QKV projection."""

    qkv_bias = True


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Qwen2ForCausalLM from ``weights``."""
    return Qwen2Builder(config, weights).build()
