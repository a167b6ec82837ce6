"""RowFactors: how much the outputs of a block's linears matter, together.

The factor of a linear is the second moment of the gradients of ``-log p`` at its outputs, [N, N]: what the Kronecker
approximation of the Fisher information has for the rows of a weight (YAQA, arXiv:2505.22988).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from aiakq.quantizers.model.activations import HiddenStates
from aiakq.quantizers.numerics.second_moment import add_second_moment, mirror
from aiakq.quantizers.workers.protocol import Value


class RowFactors:
    """The factors of a block by the name of the linear: ``budget`` bytes in memory at most, the rest in ``folder``."""

    def __init__(self, factors: Mapping[str, Tensor], budget: float, folder: Path | None) -> None:
        self._places = {name: place for place, name in enumerate(factors)}
        self._factors = HiddenStates((factor.cpu() for factor in factors.values()), budget, folder)

    def of(self, name: str) -> Tensor | None:
        """Return the factor [N, N] float32 of a linear; None if no gradient at its outputs was seen."""
        place = self._places.get(name)
        factor = None if place is None else self._factors[place]
        return None if factor is None or not bool(factor.diagonal().sum() > 0) else factor

    @property
    def bytes_in_memory(self) -> int:
        return self._factors.bytes_in_memory


class RowSums:
    """The sums over the batches of one shard, for linears with as many outputs as ``sizes`` says by name."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._totals: dict[str, Tensor] = {}

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients [T, N] float32 at the outputs of some of the linears."""
        for name, gradient in gradients.items():
            if name not in self._totals:
                # Tensors created in inference mode could not be modified in place afterwards.
                with torch.inference_mode(False):
                    size = self._sizes[name]
                    self._totals[name] = torch.zeros(size, size, device=gradient.device)
            add_second_moment(self._totals[name], gradient)

    def take(self) -> list[Value]:
        """Return the sums in the order of the linears, and begin with the next shard."""
        totals, self._totals = self._totals, {}
        return [totals[name].cpu() if name in totals else None for name in self._sizes]


def merge(total: list[Value], part: list[Value]) -> None:
    """Add the sums of one shard to those of previous ones, in place."""
    for place, value in enumerate(part):
        known = total[place]
        if isinstance(known, Tensor) and isinstance(value, Tensor):
            known.add_(value)
        elif known is None:
            total[place] = value


def finished(names: Sequence[str], totals: Sequence[Value]) -> dict[str, Tensor]:
    """Return the factors by name from the sums over all shards."""
    return {name: mirror(total) for name, total in zip(names, totals, strict=True) if isinstance(total, Tensor)}
