"""EXAONE 4: OLMo 2's blocks with per-head norms; layers without a sliding window have no rotary embedding."""

from __future__ import annotations

from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.olmo2 import OutputNormBuilder


class Exaone4Builder(OutputNormBuilder):
    """EXAONE 4."""

    has_head_norms = True

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None in layers without a sliding window, if the model has layers with one."""
        hybrid = self.config.raw.get("sliding_window") is not None
        return None if hybrid and self.config.layer_kinds[layer] == "full_attention" else super().rotary(layer)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """Exaone4ForCausalLM from ``weights``."""
    return Exaone4Builder(config, weights).build()
