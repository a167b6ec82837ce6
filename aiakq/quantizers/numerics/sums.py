"""Sums whose bits do not depend on the number of threads."""

from __future__ import annotations

from torch import Tensor


def total(x: Tensor) -> float:
    """Return the sum of all elements of x [..., N] in float64: first along rows, then over rows on one thread.

    torch's sum of a whole tensor is split over threads, so its last bits depend on their number.
    """
    rows = x.sum(-1).double().flatten()
    return float(rows.cpu().numpy().sum())
