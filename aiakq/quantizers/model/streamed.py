"""A model that scores texts block by block, so that it never needs more memory than one block and the hidden states.

Slower than the runtime when the model fits in memory; the only way when it does not. Works for every architecture that
can be quantized, from the source checkpoint and from the quantized one alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.model.passes import capture, finish, load_outside
from aiakq.quantizers.model.source import SourceModel

#: Tokens that pass a block at a time.
_BATCH_TOKENS = 4096


class StreamedScorer:
    """Logits of windows that were announced with ``prepare``, computed in float32 by the model's transformers class."""

    def __init__(self, folder: Path, device: torch.device, trust_remote_code: bool, hidden: HiddenStates) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.model = SourceModel(self.checkpoint, None, device, trust_remote_code)
        self.hidden = hidden
        self._windows = torch.empty(0, 0, dtype=torch.int64)
        self._next = 0

    def prepare(self, windows: Tensor, progress: Callable[[int, int], None]) -> None:
        """Run windows [W, T] int64 through all blocks; ``progress(done, total)`` counts blocks."""
        rows = max(1, _BATCH_TOKENS // windows.shape[1])
        inputs = capture(self.model, windows.split(rows), lambda _: None, self.hidden)
        total = len(self.model.blocks)
        for index, block in enumerate(self.model.blocks):
            progress(index, total)
            self.model.load(block, self.model.block_prefix(index))
            inputs.advance(block, index)
            self.model.drop(block)
            self.checkpoint.close()
        progress(total, total)
        self._windows, self._rows, self._tuples = windows, rows, inputs.tuples
        load_outside(self.model)

    def logits(self, ids: Tensor) -> Tensor:
        """ids [B, T], the next B of the prepared windows -> logits [B, T, V] float32."""
        first, last = self._next, self._next + len(ids)
        assert torch.equal(ids, self._windows[first:last]), "windows are scored in the order they were prepared in"
        self._next = last % len(self._windows)
        rows = [self.hidden[row // self._rows][row % self._rows] for row in range(first, last)]
        return finish(self.model, ids, torch.stack(rows), self._tuples)
