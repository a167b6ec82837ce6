"""OLMo 2 and 3: norms of the outputs of attention and MLP, and of whole Q and K projections (arXiv:2501.00656)."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import ProjectionNorms, ProjectionStep
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, DecoderLayer, OutputNormBlock, Weights


class ProjectionNormBuilder(DecoderBuilder):
    """Families with norms over whole query and key projections, and biases as configured."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))

    def before_attention(self, layer: int) -> list[ProjectionStep]:
        """Return the norms over whole projections."""
        queries, keys, _ = self.qkv_widths()
        q_norm = self.norm(self.layer_name(layer, self.names.q_norm), queries)
        k_norm = self.norm(self.layer_name(layer, self.names.k_norm), keys)
        return [ProjectionNorms([q_norm, k_norm], [queries, keys], self.ops)]


class OutputNormBuilder(DecoderBuilder):
    """Families with norms after attention and MLP, but not before them."""

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer."""
        return OutputNormBlock(
            self.attention(layer),
            self.norm(self.layer_name(layer, "post_attention_layernorm")),
            self.mlp(layer),
            self.norm(self.layer_name(layer, "post_feedforward_layernorm")),
            self.ops.scaling(),
        )


class Olmo2Builder(ProjectionNormBuilder, OutputNormBuilder):
    """OLMo 2 and 3; OLMo 3 has sliding windows and different rotary parameters in most layers."""


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Olmo2ForCausalLM and Olmo3ForCausalLM from ``weights``."""
    return Olmo2Builder(config, weights).build()
