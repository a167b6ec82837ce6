"""Granite: Llama with multipliers on embeddings, residuals, attention scores and logits."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Block, Decoder, DecoderLayer, Rescale, Weights


class GraniteBuilder(DecoderBuilder):
    """Llama with multipliers, and biases as configured."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))
        self.mlp_bias = bool(config.raw.get("mlp_bias", False))
        self.scale = self.multiplier("attention_multiplier")

    def multiplier(self, name: str) -> float:
        """Return a multiplier of config.json."""
        return float(self.config.raw[name])

    def after_embedding(self) -> Rescale:
        """Return the layer that multiplies embeddings by ``embedding_multiplier``."""
        return self.ops.scaling(self.multiplier("embedding_multiplier"))

    def after_head(self) -> Rescale:
        """Return the factor 1 / ``logits_scaling``."""
        return self.ops.scaling(1 / self.multiplier("logits_scaling"))

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer whose attention and MLP outputs are multiplied by ``residual_multiplier``."""
        block = super().block(layer)
        assert isinstance(block, Block)
        block.after_attention = block.after_mlp = self.ops.scaling(self.multiplier("residual_multiplier"))
        return block


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GraniteForCausalLM from ``weights``."""
    return GraniteBuilder(config, weights).build()
