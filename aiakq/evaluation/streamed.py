"""Logits of whole texts with one decoder block in memory at a time, for models that do not fit.

Slower than the runtime if the model fits. ``BlockwiseModel`` defines which models can be run this way;
``aiakq.quantizers.model.blockwise`` runs every checkpoint that can be quantized, and every quantized one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

#: Maximum tokens that pass through a block at a time.
_BATCH_TOKENS = 4096


class HiddenBatches(Protocol):
    """Hidden states [B, T, hidden size] float32 of each batch, by its index."""

    def __getitem__(self, index: int, /) -> Tensor: ...


class BlockwiseModel(Protocol):
    """A model that runs with one decoder block in memory at a time."""

    def run_blocks(self, batches: Sequence[Tensor], on_block: Callable[[int, int], None]) -> HiddenBatches:
        """Return the output of the last block for every batch of token ids [B, T] int64.

        ``on_block(done, total)`` is called before each block and after the last.
        """
        ...

    def head(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Return logits [B, T, V] float32 for ids [B, T] and their output of ``run_blocks``, [B, T, hidden size]."""
        ...


class StreamedScorer:
    """A ``Scorer`` for windows known in advance: ``prepare`` runs the blocks, ``logits`` the output layer."""

    def __init__(self, model: BlockwiseModel) -> None:
        self.model = model
        self._windows = torch.empty(0, 0, dtype=torch.int64)
        self._next = 0

    def prepare(self, windows: Tensor, progress: Callable[[int, int], None]) -> None:
        """Run windows [W, T] int64 through all blocks; ``progress(done, total)`` counts blocks."""
        self._rows = max(1, _BATCH_TOKENS // windows.shape[1])
        self._hidden = self.model.run_blocks(windows.split(self._rows), progress)
        self._windows, self._next = windows, 0

    def logits(self, ids: Tensor) -> Tensor:
        """ids [B, T], the next B of the prepared windows -> logits [B, T, V] float32."""
        first, last = self._next, self._next + len(ids)
        assert torch.equal(ids, self._windows[first:last]), "windows are scored in the order they were prepared in"
        self._next = last % len(self._windows)
        rows = [self._hidden[row // self._rows][row % self._rows] for row in range(first, last)]
        return self.model.head(ids, torch.stack(rows))
