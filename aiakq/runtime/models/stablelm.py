"""StableLM 1.6B, 2, 3B and Code: layer norms, a gated MLP, rotary embedding of a part of each head."""

from __future__ import annotations

from aiakq.kernels.ops.norm import Norm
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder, unsupported
from aiakq.runtime.models.decoder import Decoder, DecoderLayer, ParallelBlock, Weights


class StableLmBuilder(DecoderBuilder):
    """Llama's parts with layer norms."""

    rotates_parts = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = bool(config.raw.get("use_qkv_bias", False))

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Return a layer norm with weight and bias."""
        return self.layer_norm(name, width)

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer. Raises ``unsupported`` for layer norms of each head (StableLM 2 12B)."""
        if self.config.raw.get("qk_layernorm"):
            reason = "its queries and keys have layer norms"
            raise unsupported(self.config, reason)
        if not self.config.raw.get("use_parallel_residual"):
            return super().block(layer)
        norm = self.norm(self.layer_name(layer, self.names.attention_norm))
        return ParallelBlock(norm, self.attention(layer), self.mlp(layer), self.ops.scaling())


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """StableLmForCausalLM from ``weights``."""
    return StableLmBuilder(config, weights).build()
