"""Hidden states of the calibration samples between blocks, in memory or, beyond a budget, on disk."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy
import torch
from torch import Tensor

from aiakq.errors import error


class HiddenStates:
    """A list of float32 tensors of which at most ``budget`` bytes are in memory; the rest are files in ``folder``.

    Tensors on a GPU stay there, and do not count. Spilling affects only speed: files hold the same bits. Tensors may be
    absent, because other workers hold them or they have not been set yet. An absent one is None but still has a shape.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), budget: float = float("inf"), folder: Path | None = None):
        self.budget = budget
        self.folder = folder
        self.shapes: list[torch.Size] = []
        self._items: list[Tensor | _Spilled | None] = []
        self._bytes_in_memory = 0
        for tensor in tensors:
            self.append(tensor)

    def append(self, tensor: Tensor) -> None:
        self.shapes.append(tensor.shape)
        self._items.append(self._placed(tensor))

    def append_absent(self, shape: torch.Size) -> None:
        self.shapes.append(shape)
        self._items.append(None)

    def put(self, index: int, tensor: Tensor) -> None:
        """Set the tensor at ``index``, which may lie beyond the end; indices in between become absent."""
        while len(self) <= index:
            self.append_absent(torch.Size((0,)))
        self[index] = tensor

    def __len__(self) -> int:
        return len(self._items)

    def has(self, index: int) -> bool:
        """Whether the tensor at ``index`` exists and is not absent."""
        return index < len(self._items) and self._items[index] is not None

    def __getitem__(self, index: int) -> Tensor:
        item = self._items[index]
        assert item is not None, f"another worker holds batch {index}"
        return item if isinstance(item, Tensor) else item.load()

    def __setitem__(self, index: int, tensor: Tensor) -> None:
        self._bytes_in_memory -= _in_memory_bytes(self._items[index])
        self.shapes[index] = tensor.shape
        self._items[index] = self._placed(tensor)

    @property
    def bytes_in_memory(self) -> int:
        return self._bytes_in_memory

    @property
    def nbytes(self) -> int:
        """Total bytes in memory and on disk."""
        return sum(4 * shape.numel() for index, shape in enumerate(self.shapes) if self.has(index))

    def copy(self) -> HiddenStates:
        """Return a copy; files are shared until one of the two replaces them."""
        other = HiddenStates((), self.budget, self.folder)
        other.shapes, other._items, other._bytes_in_memory = list(self.shapes), list(self._items), self._bytes_in_memory
        return other

    def keep_only(self, indices: Collection[int]) -> None:
        """Make all other tensors absent."""
        for index, item in enumerate(self._items):
            if index not in indices:
                self._bytes_in_memory -= _in_memory_bytes(item)
                self._items[index] = None

    def _placed(self, tensor: Tensor) -> Tensor | _Spilled:
        size = _in_memory_bytes(tensor)
        if not size or self.folder is None or self._bytes_in_memory + size <= self.budget:
            self._bytes_in_memory += size
            return tensor
        return _Spilled(tensor, self.folder)


class _Spilled:
    """A float32 tensor in its own file, which is removed with the object."""

    _numbers = itertools.count()

    def __init__(self, tensor: Tensor, folder: Path) -> None:
        self.shape = tensor.shape
        self.path = folder / f"hidden-{os.getpid()}-{next(self._numbers)}"
        try:
            tensor.to(torch.float32).contiguous().numpy().tofile(self.path)
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise error("output_failed", path=str(folder), reason=f"hidden states found no place ({reason})") from None

    def load(self) -> Tensor:
        return torch.from_numpy(numpy.fromfile(self.path, dtype=numpy.float32)).view(self.shape)

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


def _in_memory_bytes(item: Tensor | _Spilled | None) -> int:
    """Return the bytes that an item takes in memory: a file, or a tensor on a GPU, takes none."""
    return item.nbytes if isinstance(item, Tensor) and item.device.type == "cpu" else 0
