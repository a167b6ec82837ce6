"""StableLM 1.6B, 2, 3B and Code: layer norms, a gated MLP, rotary embedding of a part of each head."""

from __future__ import annotations

from aiakq.kernels.ops.norm import Norm
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import ProjectionNorms, ProjectionStep
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, DecoderLayer, ParallelBlock, Weights


class StableLmBuilder(DecoderBuilder):
    """Llama's parts with layer norms."""

    rotates_parts = True
    rotates_odd_parts = False

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = bool(config.raw.get("use_qkv_bias", False))

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Return a layer norm with weight and bias."""
        return self.layer_norm(name, width)

    def before_attention(self, layer: int) -> list[ProjectionStep]:
        """Return the layer norms of the heads of queries and keys (StableLM 2 12B)."""
        config = self.config
        if not config.raw.get("qk_layernorm"):
            return []
        D, norms = config.head_dim, []
        for name, heads in (("q_layernorm", config.num_heads), ("k_layernorm", config.num_kv_heads)):
            names = [self.layer_name(layer, f"self_attn.{name}.norms.{head}.weight") for head in range(heads)]
            norms += [self.ops.layer_norm(self.weights.tensor(each, D), None, config.norm_eps) for each in names]
        return [ProjectionNorms(norms, [D] * len(norms), self.ops)]

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer."""
        if not self.config.raw.get("use_parallel_residual"):
            return super().block(layer)
        norm = self.norm(self.layer_name(layer, self.names.attention_norm))
        return ParallelBlock(norm, self.attention(layer), self.mlp(layer), self.ops.scaling())


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """StableLmForCausalLM from ``weights``."""
    return StableLmBuilder(config, weights).build()
