"""GPT-J: parallel blocks with one layer norm, and interleaved rotary embedding of ``rotary_dim`` elements per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aiakq.kernels.types import RotaryTables
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.builder import LayerNormBuilder, Names, rotated_part
from aiakq.runtime.models.decoder import Decoder, DecoderLayer, ParallelBlock, Weights


class GPTJBuilder(LayerNormBuilder):
    """GPT-J, with biases in the MLP and the output layer only."""

    rotates_parts = True
    names = Names(
        embedding="transformer.wte",
        layers="transformer.h",
        norm="transformer.ln_f",
        attention_norm="ln_1",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.out_proj",
        gate_up=("mlp.fc_in",),
        down="mlp.fc_out",
    )
    mlp_bias = head_bias = True

    def rotary_tables(self, rope: Mapping[str, Any]) -> RotaryTables:
        """Return interleaved tables. Raises ``unsupported`` as ``rotated_part``."""
        part = rotated_part(self.config, self.config.raw.get("rotary_dim", 64))
        return replace(super().rotary_tables({**rope, "partial_rotary_factor": part}), interleaved=True)

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer."""
        norm = self.norm(self.layer_name(layer, self.names.attention_norm))
        return ParallelBlock(norm, self.attention(layer), self.mlp(layer), self.ops.scaling())


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """GPTJForCausalLM from ``weights``."""
    return GPTJBuilder(config, weights).build()
