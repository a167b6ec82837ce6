"""Roles of linear layers in tensor parallelism: the builder of a model names one for every layer that it makes.

A role says how a layer may be split over the ranks. What is done with it depends on the math of the ranks
(ops/sharded.py, ops/row_parallel.py); a single process ignores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.types import AttentionSpec


@dataclass(frozen=True)
class Role:
    """How a linear layer is split over the ranks."""

    def of_parts(self, count: int) -> Sequence[Role]:
        """Return the role of each of the ``count`` layers that were to be fused into one with this role."""
        return [self] * count


@dataclass(frozen=True)
class Gathered(Role):
    """Sharded along its outputs, which are gathered; the role of layers without one."""


@dataclass(frozen=True)
class Replicated(Role):
    """Whole on every rank, because it is small."""


@dataclass(frozen=True)
class Column(Role):
    """Sharded along its outputs like the inputs of the only layer that reads them, and not gathered where possible.

    reader  the layer that reads an elementwise function of the outputs, made with the role ROW; or the attention that
            reads them as heads.
    parts   one letter per part of the outputs. For attention q, k or v for a part as wide as all queries, keys or
            values; else any letter for a part as wide as the inputs of ``reader``.
    """

    reader: LinearLayer | AttentionSpec
    parts: str

    def of_parts(self, count: int) -> Sequence[Role]:
        """Return the role of each part."""
        assert count == len(self.parts), "every fused layer is one part"
        return [Column(self.reader, part) for part in self.parts]


@dataclass(frozen=True)
class Row(Role):
    """Sharded along its inputs where possible; the outputs are all-reduced.

    heads  the attention whose heads the inputs are, and are split by; None: they may be split anywhere.
    """

    heads: AttentionSpec | None = None


@dataclass(frozen=True)
class ExpertRole(Role):
    """Whole on one rank: a layer of expert ``index`` of ``count``, which ``Ops.experts`` takes in this order."""

    index: int
    count: int


GATHERED, REPLICATED, ROW = Gathered(), Replicated(), Row()
