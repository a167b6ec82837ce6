"""OLMoE: Llama with norms over whole query and key projections, and small experts in every layer (arXiv:2409.02060)."""

from __future__ import annotations

from dataclasses import replace

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.experts import SparseMLP
from aiakq.runtime.models.builder import unsupported
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.olmo2 import ProjectionNormBuilder
from aiakq.runtime.models.qwen2_moe import mixture


class OlmoeBuilder(ProjectionNormBuilder):
    """OLMoE, whose experts have the intermediate size of the config."""

    def mlp(self, layer: int) -> SparseMLP:
        """Return the experts of a layer."""
        width = {"moe_intermediate_size": self.config.intermediate_size}
        named = replace(self.config, raw={**self.config.raw, **width})
        return mixture(named, layer).build(self.config, self.weights)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """OlmoeForCausalLM from ``weights``. Raises ``unsupported`` if the projections are clipped."""
    if config.raw.get("clip_qkv") is not None:
        reason = "its queries, keys and values are clipped (clip_qkv)"
        raise unsupported(config, reason)
    return OlmoeBuilder(config, weights).build()
