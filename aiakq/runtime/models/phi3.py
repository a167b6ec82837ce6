"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections and partial rotary embedding (arXiv:2404.14219)."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder, Names
from aiakq.runtime.models.decoder import Decoder, Weights


class Phi3Builder(DecoderBuilder):
    """Llama with fused projections."""

    rotates_parts = True
    names = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Phi3ForCausalLM from ``weights``."""
    return Phi3Builder(config, weights).build()
