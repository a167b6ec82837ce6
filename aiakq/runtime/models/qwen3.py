"""Qwen3: Llama with RMS norms on every query and key head."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.llama import build_llama_like


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Qwen3ForCausalLM from ``weights``."""
    bias = bool(config.raw.get("attention_bias", False))
    return build_llama_like(config, weights, qkv_bias=bias, output_bias=bias, head_norms=True)
