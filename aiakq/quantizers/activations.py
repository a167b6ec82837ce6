"""The hidden states that flow from block to block during calibration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Call:
    """How a block is called, besides its hidden states."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs


class Activations:
    """The hidden states of every calibration batch, before the block that comes next; kept on the CPU.

    hidden  one [B, T, hidden] float32 per batch.
    calls   [B, T] -> the call of every block; equal shapes are called equally, because no batch has padding.
    """

    def __init__(self, hidden: list[Tensor], calls: dict[tuple[int, ...], list[Call]], device: torch.device) -> None:
        self.hidden = hidden
        self.calls = calls
        self.device = device

    def run(self, block: nn.Module, index: int, batch: int) -> Tensor:
        """The output of block ``index`` on one batch, on the device."""
        hidden = self.hidden[batch].to(self.device)
        call = self.calls[tuple(hidden.shape[:2])][index]
        out = block(hidden, *call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) else out

    def advance(self, block: nn.Module, index: int) -> None:
        """Replace every batch by the output of block ``index`` on it."""
        with torch.inference_mode():
            for batch in range(len(self.hidden)):
                self.hidden[batch] = self.run(block, index, batch).to("cpu")

    def copy(self) -> Activations:
        """The same hidden states, to go another way from here."""
        return Activations(list(self.hidden), self.calls, self.device)

    @property
    def tokens(self) -> int:
        return sum(hidden.shape[0] * hidden.shape[1] for hidden in self.hidden)


def batched(samples: Iterable[Tensor], rows: int = 8) -> list[Tensor]:
    """Samples [T] of equal length next to each other, at most ``rows`` in a batch [B, T]; order is kept otherwise."""
    by_length: dict[int, list[Tensor]] = {}
    for sample in samples:
        by_length.setdefault(len(sample), []).append(sample)
    return [
        torch.stack(group[start : start + rows]) for group in by_length.values() for start in range(0, len(group), rows)
    ]
