"""Qwen3-MoE: Qwen3 with many small experts and no shared expert."""

from __future__ import annotations

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import MLP, Decoder, Weights
from aiakq.runtime.models.qwen2_moe import is_sparse, mixture
from aiakq.runtime.models.qwen3 import Qwen3Builder


class Qwen3MoeBuilder(Qwen3Builder):
    """Qwen3 with experts."""

    def mlp(self, layer: int) -> MLP:
        """Return the experts of a layer, or a dense MLP."""
        if not is_sparse(self.config, layer):
            return super().mlp(layer)
        return mixture(self.config, layer).build(self.config, self.weights)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Qwen3MoeForCausalLM from ``weights``."""
    return Qwen3MoeBuilder(config, weights).build()
