"""GLM-4.5 and 4.6: Llama with biases of queries, keys and values, and experts chosen by sigmoids within groups."""

from __future__ import annotations

from torch import Tensor

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.shared_experts import SharedExpertsBuilder


class Glm4MoeBuilder(SharedExpertsBuilder):
    """Dense layers first, then experts and a shared one; part of each head is rotated."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = bool(config.raw.get("attention_bias", False))

    def head_norms(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Weights [D] of the norms of every head, where ``use_qk_norm`` says so."""
        if not self.config.raw.get("use_qk_norm", False):
            return None, None
        q_norm, k_norm = (
            self.weights.tensor(f"{self.at(layer, name)}.weight", self.config.head_dim)
            for name in (self.names.q_norm, self.names.k_norm)
        )
        return q_norm, k_norm


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Glm4MoeForCausalLM from ``weights``."""
    return Glm4MoeBuilder(config, weights).build()
