"""A lower bound of the time that a quantization takes: its matrix products, at the rate of this machine.

The products are counted: every linear runs once on every calibration token, and gptq adds a second moment of each
input, its factors and the columns. What else there is, such as attention, searches of scales, and files, is not known
before it happens, so that the bound says how long it takes at least.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from aiakq.quantizers.recipe import Recipe

#: Shape of the measured product, and the time for which it is repeated.
_ROWS, _WIDTH, _SECONDS = 512, 1024, 0.3


@dataclass(frozen=True)
class LeastTime:
    """The bound.

    operations  floating-point operations of the counted products.
    rate        operations per second, the best of several products just measured.
    """

    operations: float
    rate: float

    @property
    def seconds(self) -> float:
        return self.operations / self.rate

    @property
    def basis(self) -> str:
        return (
            f"{self.operations / 1e9:,.0f} billion operations of matrix products at {self.rate / 1e9:.1f} billion a "
            "second, measured on this machine just now; searches, attention and files take more"
        )


def operations(
    groups: Iterable[tuple[int, int]], tokens: int, original_tokens: int, recipe: Recipe, sweeps: int
) -> float:
    """Count the operations of all blocks.

    groups  N and K of linears that share an input, N summed.
    sweeps  sweeps of gptq over the columns.
    """
    total = 0.0
    for n, k in groups:
        total += 2 * (tokens + original_tokens) * n * k
        if recipe.rounder.name in ("gptq", "gptq_blocks"):
            # The triangle of the second moment, two factors, the loop over columns, and the sweeps.
            total += tokens * k * k + 2 * k**3 / 3 + n * k * k * (1 + 2 * sweeps)
    return total


def measured_rate() -> float:
    """Return the operations per second of a product of float32 matrices, with the threads that torch uses."""
    left, right = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    best, began = 0.0, time.perf_counter()
    while time.perf_counter() - began < _SECONDS:
        start = time.perf_counter()
        left @ right
        best = max(best, 2 * _ROWS * _WIDTH * _WIDTH / (time.perf_counter() - start))
    return best
