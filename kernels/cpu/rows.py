"""Helpers for row-wise operations: thread count and contiguous rows."""

from __future__ import annotations

from torch import Tensor

#: Minimum number of elements for which several threads are faster than one.
PARALLEL_FROM = 1 << 16


def threads_for(elements: int) -> int:
    """Return the number of threads for this number of elements; 0: torch's number."""
    return 1 if elements < PARALLEL_FROM else 0


def as_rows(x: Tensor) -> Tensor:
    """View x [..., D] as [M, D] with contiguous rows, copying only if necessary."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
