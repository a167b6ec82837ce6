"""MPNet (Song et al. 2020, arXiv:2004.09297): RoBERTa with a bias of attention by position, without segments."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.layers.encoder_attention import PositionBias
from aiakq.runtime.models.builder import Names
from aiakq.runtime.models.decoder import Decoder, Weights
from aiakq.runtime.models.encoders.roberta import RobertaBuilder

#: Buckets of relative positions, half of them for either direction, and the distance from which on all are in one.
_BUCKETS, _FARTHEST = 32, 128


class RelativeBias:
    """The bias of scores by relative position, the same in all layers.

    table   [buckets, H].
    length  the longest text.
    """

    def __init__(self, table: Tensor, length: int) -> None:
        self._table, self._length = table, length

    def __call__(self, start: int, end: int, length: int) -> Tensor:
        """See PositionBias."""
        return self._all[:, start:end, :length]

    @cached_property
    def _all(self) -> Tensor:
        at = torch.arange(self._length)
        buckets = relative_buckets(at[None, :] - at[:, None])
        return self._table[buckets.to(self._table.device)].permute(2, 0, 1).contiguous()


def relative_buckets(offset: Tensor) -> Tensor:
    """Return the bucket [T, T] of each ``offset`` [T, T] int64, the key's position minus the query's.

    Half of a direction's buckets are for single distances, the others grow logarithmically (Raffel et al. 2019,
    arXiv:1910.10683, section 2.1).
    """
    half = _BUCKETS // 2
    exact, distance = half // 2, offset.abs()
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(_FARTHEST / exact)
    far = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(offset > 0, half, 0) + torch.where(distance < exact, distance, far)


class MPNetBuilder(RobertaBuilder):
    """MPNet."""

    names = Names(
        embedding="embeddings.word_embeddings",
        layers="encoder.layer",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        output="attention.attn.o",
        attention_norm="attention.LayerNorm",
        gate_up=("intermediate.dense",),
        down="output.dense",
        mlp_norm="output.LayerNorm",
    )
    segment_table = ""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        table = weights.tensor(self._name("encoder.relative_attention_bias.weight"), _BUCKETS, config.num_heads)
        self._bias = RelativeBias(table, min(config.num_positions, config.max_position))

    def position_bias(self) -> PositionBias:
        """See EncoderBuilder."""
        return self._bias


def build(config: ModelConfig, weights: Weights) -> Decoder:
    """See FamilyModule."""
    return MPNetBuilder(config, weights).build()
