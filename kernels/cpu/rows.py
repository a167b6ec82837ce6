"""Helpers of row-wise operations: thread count and contiguous rows."""

from __future__ import annotations

from torch import Tensor

#: Below this number of elements one thread is faster than waking others.
PARALLEL_FROM = 1 << 16


def threads_for(elements: int) -> int:
    """The number of threads for so many elements; 0: torch's number."""
    return 1 if elements < PARALLEL_FROM else 0


def as_rows(x: Tensor) -> Tensor:
    """x [..., D] as [M, D] with contiguous rows; a copy only where it must be."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
