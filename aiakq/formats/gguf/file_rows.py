"""FileRows: rows of blocks in a GGUF file, picked and put in order before any is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.formats.gguf.file import GGUFFile
from aiakq.kernels.block_weight import StoredRows

#: Bits of a position in a file; those above are the file's number.
_POSITION = 48


@dataclass(frozen=True, eq=False)
class FileRows:
    """See StoredRows.

    file  the GGUF file, with its other parts.
    """

    file: GGUFFile
    starts: Tensor
    width: int

    @classmethod
    def of(cls, file: GGUFFile, name: str) -> FileRows:
        """Return all rows of a tensor. Raises KeyError for an unknown name."""
        tensor = file.tensors[name]
        first = (file.files.index(tensor.file) << _POSITION) + tensor.offset
        starts = torch.arange(first, first + tensor.nbytes, tensor.row_bytes)
        return cls(file, starts, tensor.row_bytes)

    def descriptors(self) -> list[int]:
        """See StoredRows. Raises ``model_malformed`` if a file has changed since its header was read."""
        used = set((self.starts >> _POSITION).unique().tolist())
        return [self.file.descriptor(name) if index in used else -1 for index, name in enumerate(self.file.files)]

    def read(self) -> Tensor:
        """See StoredRows. Raises ``model_malformed``."""
        values = torch.empty(len(self.starts), self.width, dtype=torch.uint8)
        ends = (self.starts.diff() != self.width).nonzero().squeeze(1).add(1).tolist()
        for first, end in zip([0, *ends], [*ends, len(values)], strict=True):
            start = int(self.starts[first])
            name, position = self.file.files[start >> _POSITION], start & ((1 << _POSITION) - 1)
            values[first:end] = self.file.read_at(name, position, end - first, self.width)
        return values

    def select(self, rows: Tensor) -> FileRows:
        """See StoredRows: rows [M] int64."""
        return FileRows(self.file, self.starts[rows], self.width)

    def followed_by(self, others: Sequence[StoredRows]) -> FileRows | None:
        """See StoredRows."""
        same = [each for each in others if isinstance(each, FileRows) and each.file is self.file]
        if len(same) < len(others):
            return None
        return FileRows(self.file, torch.cat([self.starts, *(each.starts for each in same)]), self.width)
