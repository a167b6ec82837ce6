"""Llama: RMS norms, rotary embedding, a gated MLP (Touvron et al. 2023, arXiv:2302.13971)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiakq.errors import error
from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import DecoderBuilder
from aiakq.runtime.models.decoder import Decoder, Weights


class WholeHeadsBuilder(DecoderBuilder):
    """Families whose transformers class always rotates whole heads, whatever the config says."""

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Return the tables. Raises ``unsupported`` if transformers ignores ``partial_rotary_factor``."""
        part = rope.get("partial_rotary_factor", 1.0)
        if part != 1:
            what = f"partial_rotary_factor {part} in a {self.config.architecture}"
            raise error("unsupported", what=what, hint="transformers ignores it there; remove it from config.json.")
        return super().rotary_tables(rope)


class LlamaBuilder(WholeHeadsBuilder):
    """Llama, with biases as configured."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.qkv_bias = self.output_bias = bool(config.raw.get("attention_bias", False))
        self.mlp_bias = bool(config.raw.get("mlp_bias", False))


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """LlamaForCausalLM from ``weights``."""
    return LlamaBuilder(config, weights).build()
