"""BlockWeight: a quantized weight in the rows of blocks of a GGUF file, unpacked only where that is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import QWeight


@dataclass(frozen=True)
class BlockKind:
    """What is known of a weight from the kind of its blocks alone.

    name         of the kind.
    number       ggml's number of it.
    values       inputs per block.
    nbytes       bytes per block.
    scheme       and
    group_size   as in QWeight.
    table        name of the values of codes (tables.py), or None.
    has_offsets  whether values have offsets.
    halves       bytes of a block at which its float16 numbers are, first that of the scales, then that of the offsets;
                 empty for MXFP4, whose first byte is an exponent.
    """

    name: str
    number: int
    values: int
    nbytes: int
    scheme: str
    group_size: int
    table: str | None
    has_offsets: bool
    halves: tuple[int, ...]


class BlockWeight(QWeight):
    """A QWeight of rows of blocks. Codes, scales and offsets are unpacked when they are first asked for.

    rows     [N, bytes of K values] uint8.
    kind     of its blocks, without zero points.
    unpack   returns the weight of rows [N, bytes of K values], without bias.
    bias     [N] float, or None.
    """

    def __init__(
        self, rows: Tensor, kind: BlockKind, unpack: Callable[[Tensor], QWeight], bias: Tensor | None = None
    ) -> None:
        self.rows, self.kind, self.bias = rows, kind, bias
        self.scheme, self.group_size = kind.scheme, kind.group_size
        self.table = None if kind.table is None else torch.tensor(TABLES[kind.table])
        self._unpack = unpack

    @cached_property
    def unpacked(self) -> QWeight:
        """The same weight as an ordinary QWeight."""
        return replace(self._unpack(self.rows), bias=self.bias)

    @cached_property
    def codes(self) -> Tensor:
        return self.unpacked.codes

    @cached_property
    def scales(self) -> Tensor:
        return self.unpacked.scales

    @cached_property
    def offsets(self) -> Tensor | None:
        return self.unpacked.offsets

    @property
    def has_offsets(self) -> bool:
        return self.kind.has_offsets

    @property
    def n(self) -> int:
        return self.rows.shape[0]

    @property
    def k(self) -> int:
        return self.rows.shape[1] // self.kind.nbytes * self.kind.values

    def _changed(self, rows: Tensor, bias: Tensor | None) -> BlockWeight:
        return BlockWeight(rows, self.kind, self._unpack, bias)

    def with_bias(self, bias: Tensor | None) -> BlockWeight:
        """See QWeight: bias [N]."""
        return self._changed(self.rows, bias)

    def to(self, device: torch.device) -> QWeight:
        """See QWeight. Other devices get codes."""
        return self if device == self.rows.device else self.unpacked.to(device)

    def with_rows(self, rows: Tensor) -> BlockWeight:
        """See QWeight: rows [M] int64."""
        return self._changed(self.rows[rows], None if self.bias is None else self.bias[rows])

    def with_inputs(self, first: int, end: int) -> QWeight:
        """See QWeight."""
        if first % self.kind.values or end % self.kind.values:
            return self.unpacked.with_inputs(first, end)
        size = self.kind.nbytes
        rows = self.rows[:, first // self.kind.values * size : end // self.kind.values * size]
        return self._changed(rows.contiguous(), self.bias)

    def followed_by(self, others: Sequence[QWeight]) -> BlockWeight | None:
        """Return the weight with the rows of others [N_i, K] after its own; None if one has other blocks."""
        same = [each for each in others if isinstance(each, BlockWeight) and each.kind == self.kind]
        if len(same) < len(others) or any(each.k != self.k for each in same):
            return None
        biases = [each.bias for each in (self, *same) if each.bias is not None]
        if biases and len(biases) <= len(same):
            return None
        rows = torch.cat([self.rows, *(each.rows for each in same)])
        return self._changed(rows, torch.cat(biases) if biases else None)
