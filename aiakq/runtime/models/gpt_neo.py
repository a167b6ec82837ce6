"""GPT-Neo: GPT-2 with separate projections, scores that are not scaled, and a window in every second layer."""

from __future__ import annotations

from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import LayerNormBuilder, Names
from aiakq.runtime.models.decoder import Decoder, Weights


class GPTNeoBuilder(LayerNormBuilder):
    """GPT-Neo."""

    names = Names(
        embedding="transformer.wte",
        layers="transformer.h",
        norm="transformer.ln_f",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        qkv=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
        output="attn.attention.out_proj",
        gate_up=("mlp.c_fc",),
        down="mlp.c_proj",
    )
    output_bias = mlp_bias = True
    scale = 1.0

    def positions(self) -> EmbeddingLayer:
        """Return the embedding of learned positions."""
        config = self.config
        return self.ops.embedding(
            self.weights.tensor("transformer.wpe.weight", config.max_position, config.hidden_size)
        )

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None, since positions are learned."""
        return None


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GPTNeoForCausalLM from ``weights``."""
    return GPTNeoBuilder(config, weights).build()
