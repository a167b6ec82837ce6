"""EXAONE 4: OLMo 2's blocks with norms of every head; layers without a window have no rotary positions."""

from __future__ import annotations

from torch import Tensor

from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.olmo2 import OutputNormBuilder


class Exaone4Builder(OutputNormBuilder):
    """EXAONE 4."""

    def head_norms(self, layer: int) -> tuple[Tensor, Tensor]:
        """Weights [D] of the norms of every head."""
        q_norm, k_norm = (
            self.weights.tensor(f"{self.at(layer, name)}.weight", self.config.head_dim)
            for name in (self.names.q_norm, self.names.k_norm)
        )
        return q_norm, k_norm

    def rotary(self, layer: int) -> RotaryTables | None:
        """None where a model with windows has a layer without one."""
        hybrid = self.config.raw.get("sliding_window") is not None
        return None if hybrid and self.config.layer_kinds[layer] == "full_attention" else super().rotary(layer)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Exaone4ForCausalLM from ``weights``."""
    return Exaone4Builder(config, weights).build()
