"""Bamba: Mamba 2 in most layers, attention in some, an MLP in all."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder, Names
from aiakq.runtime.models.decoder import Decoder, Mixer, Weights
from aiakq.runtime.models.mamba2 import StateSpace, hybrid_width


class BambaBuilder(DecoderBuilder):
    """Llama with Mamba 2 in some layers, and rotary embedding of half of each head."""

    rotates_parts = True
    names = Names(
        norm="model.final_layernorm",
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    )

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))
        self.mlp_bias = bool(config.raw.get("mlp_bias", False))

    def attention(self, layer: int) -> Mixer:
        """Return attention or Mamba 2, depending on the layer."""
        return super().attention(layer) if self.config.layer_kinds[layer] != "linear_attention" else self.mamba(layer)

    def mamba(self, layer: int) -> Mixer:
        """Return the Mamba 2 layer."""
        raw = self.config.raw
        sizes = StateSpace.of_hybrid(raw)
        return sizes.build(self.config, self.weights, self.layer_name(layer, "mamba"), hybrid_width(raw))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """BambaForCausalLM from ``weights``."""
    return BambaBuilder(config, weights).build()
