"""GPT-Neo: GPT-2 with separate projections, scores that are not scaled, and a window in every second layer."""

from __future__ import annotations

from dataclasses import replace

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.gpt2 import LearnedPositionsBuilder


class GPTNeoBuilder(LearnedPositionsBuilder):
    """GPT-Neo."""

    names = replace(
        LearnedPositionsBuilder.names,
        qkv=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
        output="attn.attention.out_proj",
    )
    scale = 1.0


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GPTNeoForCausalLM from ``weights``."""
    return GPTNeoBuilder(config, weights).build()
