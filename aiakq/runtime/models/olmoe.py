"""OLMoE: Llama with norms of all queries and keys of a token, and small experts in every layer (arXiv:2409.02060)."""

from __future__ import annotations

from dataclasses import replace

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.attention import ProjectionNorms, ProjectionStep
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.builder import DecoderBuilder, unsupported
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.qwen2_moe import mixture


class OlmoeBuilder(DecoderBuilder):
    """Norms over whole projections, experts of the width that the config gives for the MLP."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))

    def before_attention(self, layer: int) -> list[ProjectionStep]:
        """Norms over the whole projections."""
        queries, keys, _ = self.qkv_widths()
        q_norm = self.norm(self.at(layer, self.names.q_norm), queries)
        k_norm = self.norm(self.at(layer, self.names.k_norm), keys)
        return [ProjectionNorms(q_norm, k_norm, (queries, keys), self.ops)]

    def mlp(self, layer: int) -> SparseMLP:
        """The experts of a layer."""
        width = {"moe_intermediate_size": self.config.intermediate_size}
        named = replace(self.config, raw={**self.config.raw, **width})
        return mixture(named, layer).build(self.config, self.weights)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """OlmoeForCausalLM from ``weights``. Raises ``unsupported`` where projections are clipped."""
    if config.raw.get("clip_qkv") is not None:
        reason = "its queries, keys and values are clipped (clip_qkv)"
        raise unsupported(config, reason)
    return OlmoeBuilder(config, weights).build()
