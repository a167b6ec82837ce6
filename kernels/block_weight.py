"""BlockWeight: a quantized weight in the rows of blocks of a GGUF file, unpacked only where that is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn, Protocol

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
    """

    name: str
    number: int
    values: int
    nbytes: int
    scheme: str
    group_size: int
    table: str | None
    has_offsets: bool


class StoredRows(Protocol):
    """Rows of bytes in open files, which are not read yet.

    starts  [N] int64, the number of a row's file times 2**48, plus the position of its first byte.
    width   bytes of a row.
    """

    @property
    def starts(self) -> Tensor:
        """[N] int64."""

    @property
    def width(self) -> int:
        """Bytes of a row."""

    def descriptors(self) -> list[int]:
        """Return the descriptors of all files, -1 for those without rows; raise if one has changed since it was opened.

        They stay open until the owner of the files closes them, between linears.
        """

    def read(self) -> Tensor:
        """Return the rows [N, width] uint8."""

    def select(self, rows: Tensor) -> StoredRows:
        """Return the rows ``rows`` [M] int64, in this order."""

    def followed_by(self, others: Sequence[StoredRows]) -> StoredRows | None:
        """Return these rows and those of others, or None if they are not in the same files."""


class BlockWeight(QWeight):
    """A QWeight of rows of blocks. Codes, scales and offsets are unpacked when they are first asked for.

    stored  the rows: [N, bytes of K values] uint8, or still in files.
    kind    of its blocks, without zero points.
    unpack  returns the weight of rows [N, bytes of K values], without bias.
    bias    [N] float, or None.
    origin  the weights from whose rows this one was made.
    """

    def __init__(
        self,
        stored: Tensor | StoredRows,
        kind: BlockKind,
        unpack: Callable[[Tensor], QWeight],
        bias: Tensor | None = None,
        origin: Sequence[BlockWeight] = (),
    ) -> None:
        self.stored, self.kind, self.bias = stored, kind, bias
        self.scheme, self.group_size = kind.scheme, kind.group_size
        self.table = None if kind.table is None else torch.tensor(TABLES[kind.table])
        self._unpack, self._origin = unpack, origin

    @cached_property
    def unpacked(self) -> QWeight:
        """The same weight as an ordinary QWeight."""
        return replace(self._unpack(self.rows), bias=self.bias)

    # mypy takes these for properties that cannot be set, unlike the fields.
    @cached_property
    def codes(self) -> Tensor:  # type: ignore[override]
        """[N, K]; see QWeight."""
        return self.unpacked.codes

    @cached_property
    def scales(self) -> Tensor:  # type: ignore[override]
        """[N, K / G]; see QWeight."""
        return self.unpacked.scales

    @cached_property
    def offsets(self) -> Tensor | None:  # type: ignore[override]
        """[N, K / G], or None; see QWeight."""
        return self.unpacked.offsets

    @property
    def has_offsets(self) -> bool:
        return self.kind.has_offsets

    @property
    def rows(self) -> Tensor:
        """The rows [N, bytes of K values] uint8, which are read if they are in files."""
        return self.stored if isinstance(self.stored, Tensor) else self.stored.read()

    def places(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the rows, contiguous, None, None; or None, their ``starts`` and the files' descriptors [F] int32."""
        if isinstance(self.stored, Tensor):
            return self.stored.contiguous(), None, None
        return None, self.stored.starts, torch.tensor(self.stored.descriptors(), dtype=torch.int32)

    def check_unchanged(self) -> None:
        """Raise what opening the files raises if one has changed since."""
        if not isinstance(self.stored, Tensor):
            self.stored.descriptors()

    def raise_failure(self) -> NoReturn:
        """Raise what reading and unpacking the rows raises, which has failed elsewhere."""
        for each in self._origin or (self,):
            _ = each.unpacked
        raise OSError("rows of blocks could not be read, and then could")

    @property
    def n(self) -> int:
        return len(self.stored if isinstance(self.stored, Tensor) else self.stored.starts)

    @property
    def k(self) -> int:
        width = self.stored.shape[1] if isinstance(self.stored, Tensor) else self.stored.width
        return width // self.kind.nbytes * self.kind.values

    def with_bias(self, bias: Tensor | None) -> BlockWeight:
        """See QWeight: bias [N]."""
        return self._of(self.stored, bias)

    def to(self, device: torch.device) -> QWeight:
        """See QWeight. Other devices than the CPU get codes."""
        return self if device.type == "cpu" else self.unpacked.to(device)

    def with_rows(self, rows: Tensor) -> BlockWeight:
        """See QWeight: rows [M] int64."""
        stored = self.stored[rows] if isinstance(self.stored, Tensor) else self.stored.select(rows)
        return self._of(stored, None if self.bias is None else self.bias[rows])

    def with_inputs(self, first: int, end: int) -> QWeight:
        """See QWeight."""
        values, size = self.kind.values, self.kind.nbytes
        if first % values or end % values:
            return self.unpacked.with_inputs(first, end)
        return self._of(self.rows[:, first // values * size : end // values * size].contiguous(), self.bias)

    def followed_by(self, others: Sequence[QWeight]) -> BlockWeight | None:
        """Return the weight with the rows of others [N_i, K] after its own; None if one has other blocks, or only some
        have biases.
        """
        same = [each for each in others if isinstance(each, BlockWeight) and each.kind == self.kind]
        biases = [each.bias for each in (self, *same) if each.bias is not None]
        if len(same) < len(others) or any(each.k != self.k for each in same) or 0 < len(biases) <= len(same):
            return None
        files = [each.stored for each in same if not isinstance(each.stored, Tensor)]
        stored: Tensor | StoredRows | None = None
        if not isinstance(self.stored, Tensor) and len(files) == len(same):
            stored = self.stored.followed_by(files)
        if stored is None:
            stored = torch.cat([self.rows, *(each.rows for each in same)])
        bias = torch.cat(biases) if biases else None
        return BlockWeight(stored, self.kind, self._unpack, bias, (self, *same))

    def _of(self, stored: Tensor | StoredRows, bias: Tensor | None) -> BlockWeight:
        return BlockWeight(stored, self.kind, self._unpack, bias, self._origin or (self,))
