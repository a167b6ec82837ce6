"""Qwen2, Qwen2.5 and MiMo: Llama with biases in the QKV projection."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, Weights


class Qwen2Builder(DecoderBuilder):
    """Llama with biases in the QKV projection."""

    qkv_bias = True


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Qwen2ForCausalLM or MiMoForCausalLM from ``weights``."""
    return Qwen2Builder(config, weights).build()
