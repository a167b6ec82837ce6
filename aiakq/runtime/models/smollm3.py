"""SmolLM3: Llama without rotary embedding in every fourth layer."""

from __future__ import annotations

from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.config.rope import rotated_layers
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.llama import LlamaBuilder


class SmolLM3Builder(LlamaBuilder):
    """Llama without rotary embedding in some layers."""

    def rotary(self, layer: int) -> RotaryTables | None:
        """Return None in layers for which ``no_rope_layers`` is 0, by default every ``no_rope_layer_interval``-th."""
        rotated = rotated_layers(self.config.raw, self.config.num_layers)
        return super().rotary(layer) if rotated[layer] else None


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """SmolLM3ForCausalLM from ``weights``."""
    return SmolLM3Builder(config, weights).build()
