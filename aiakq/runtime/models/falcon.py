"""Falcon: layer norms, one projection for queries, keys and values, parallel blocks (arXiv:2311.16867)."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.models.alibi import AlibiBuilder
from aiakq.runtime.models.bloom import BloomBuilder
from aiakq.runtime.models.builder import LayerNormBuilder, rows_by_part, unsupported
from aiakq.runtime.models.decoder import Block, Decoder, DecoderLayer, ParallelBlock, Weights


class FalconBuilder(LayerNormBuilder):
    """Falcon in its three variants: multi-query, multi-head and grouped-query attention."""

    names = BloomBuilder.names

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        raw = config.raw
        super().__init__(replace(config, activation=str(raw.get("activation") or "gelu")), weights)
        self.qkv_bias = self.output_bias = self.mlp_bias = bool(raw.get("bias", False))
        self.grouped = bool(raw.get("new_decoder_architecture", False))
        if raw.get("num_ln_in_parallel_attn") == 2 and not self.grouped:
            raise unsupported(config, "two norms in a layer of the first decoder architecture")

    def qkv(self, layer: int) -> LinearLayer:
        """Return the QKV projection, which is stored interleaved by group."""
        config = self.config
        groups, D = config.num_kv_heads, config.head_dim
        if groups == 1:
            return super().qkv(layer)
        per_group = config.num_heads // groups
        rows = rows_by_part(groups, per_group * D, D, D)
        name = self.layer_name(layer, self.names.qkv[0])
        return self.weights.linear(
            name, len(rows), config.hidden_size, bias=self.qkv_bias, rows=rows, role=self.qkv_role
        )

    def block(self, layer: int) -> DecoderLayer:
        """Return a layer; newer models have separate norms for attention and MLP."""
        raw, attention, mlp = self.config.raw, self.attention(layer), self.mlp(layer)
        if not raw.get("parallel_attn", True) and not self.grouped:
            names = ("input_layernorm", "post_attention_layernorm")
            first, second = (self.norm(self.layer_name(layer, name)) for name in names)
            return Block(first, attention, second, mlp)
        add = self.ops.scaling()
        if self.grouped and raw.get("num_ln_in_parallel_attn") in (None, 2):
            first, second = (self.norm(self.layer_name(layer, name)) for name in ("ln_attn", "ln_mlp"))
            return ParallelBlock(first, attention, mlp, add, second)
        return ParallelBlock(self.norm(self.layer_name(layer, "input_layernorm")), attention, mlp, add)


class FalconAlibiBuilder(FalconBuilder, AlibiBuilder):
    """Falcon-RW: ALiBi, added to the scores before they are scaled."""

    def slopes(self) -> Tensor:
        """Return the slopes [H] float32 with the scale of the scores.

        The authors' and transformers' code rounds each bias to bfloat16; here, as in the paper, biases are not rounded.
        """
        return super().slopes() * math.sqrt(1 / self.config.head_dim)


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """FalconForCausalLM from ``weights``. Raises ``unsupported``."""
    return (FalconAlibiBuilder if config.raw.get("alibi") else FalconBuilder)(config, weights).build()
