"""EncoderModel: a model whose attention reads whole texts, with the parts that decoders do not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.norm import Norm
from aiakq.kernels.types import ActivationLayout, LinearInput
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import ModelInput, StageOutput

#: Rows of pooled hidden states [R, D] float32 on the host -> scores [R, labels].
PooledHead = Callable[[Tensor], Tensor]


@dataclass
class Segments:
    """The second texts of the pairs in the next step, as ranges of its rows; ``EncoderPart`` fills it in."""

    second: Sequence[range] = ()


@dataclass
class EncoderEmbedding:
    """The input of the first layer: sum of embeddings of the token, its segment and its position, and a norm.

    positions  table of learned positions, or None.
    segments   table of segments [segments, D], or None.
    offset     position of the first token in ``positions``; with one, padding tokens within a text do not count, and
               have position ``offset`` - 1 (RoBERTa).
    pad        id of the padding token.
    """

    words: EmbeddingLayer
    norm: Norm
    positions: EmbeddingLayer | None = None
    segments: Tensor | None = None
    offset: int = 0
    pad: int = 0

    def __call__(self, step: ModelInput, second: Sequence[range]) -> Tensor:
        """Return [T, D]; ``second`` are the rows of second texts."""
        x = self.words(step.token_ids)
        if self.segments is not None:
            ids = torch.zeros(len(x), dtype=torch.int64)
            for rows in second:
                ids[rows.start : rows.stop] = 1
            x = x + self.segments[ids.to(x.device)]
        if self.positions is not None:
            x = x + self.positions(self._positions(step))
        normed = self.norm(x)
        assert isinstance(normed, Tensor)
        return normed

    def _positions(self, step: ModelInput) -> Tensor:
        if self.offset == 0:
            return step.positions
        counts = (step.token_ids != self.pad).long()
        found = torch.full_like(counts, self.offset - 1)
        for start, end in pairwise(step.context.query_start_list):
            found[start:end] += counts[start:end].cumsum(0) * counts[start:end]
        return found


class Identity:
    """No norm: before the attention of the first layer of ModernBERT."""

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, layout: ActivationLayout | None = None
    ) -> LinearInput:
        """Return x [M, D]; there is no residual before the first layer."""
        assert residual is None
        return x


@dataclass
class HeadLayer:
    """A linear layer of a head, in float32 on the host.

    weight    [N, K]; bias [N] or None.
    function  applied to its outputs, or None.
    norm      weight [N], bias [N] or None, and epsilon of a layer norm behind it, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    function: Callable[[Tensor], Tensor] | None = None
    norm: tuple[Tensor, Tensor | None, float] | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [R, K] -> [R, N]."""
        rows = F.linear(rows, _host(self.weight), None if self.bias is None else _host(self.bias))
        if self.function is not None:
            rows = self.function(rows)
        if self.norm is not None:
            weight, bias, epsilon = self.norm
            bias = None if bias is None else _host(bias)
            rows = F.layer_norm(rows, rows.shape[-1:], _host(weight), bias, epsilon)
        return rows


def _host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float32)


@dataclass
class ScoreHead:
    """Scores of pooled rows: layers, one after the other. Its rows are few, so it is computed on the host."""

    layers: Sequence[HeadLayer]

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [R, D] float32 -> [R, labels]; row by row, so that none depends on the others."""
        return torch.cat([self._one(row) for row in rows.split(1)]) if len(rows) else self._one(rows)

    def _one(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows


@dataclass
class EncoderModel(Decoder):
    """An encoder; its output are the hidden states of every token, and ``pooled_head`` makes scores of them.

    num_keys  see ``EncoderAttention``; ``EncoderPart`` fills it in.
    """

    inputs: EncoderEmbedding | None = None
    pooled_head: PooledHead | None = None
    segments: Segments = field(default_factory=Segments)
    num_keys: dict[int, int] = field(default_factory=dict)

    @property
    def num_segments(self) -> int:
        """The number of segments that tokens may belong to; the texts of a pair are two where there are two."""
        table = None if self.inputs is None else self.inputs.segments
        return 1 if table is None else len(table)

    def _embedded(self, step: ModelInput) -> StageOutput:
        assert self.inputs is not None
        return StageOutput(self.inputs(step, self.segments.second), None)
