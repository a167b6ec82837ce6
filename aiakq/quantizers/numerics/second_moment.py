"""Second moment of a linear's inputs, ``x^T x``: the Hessian of its squared output error, up to a factor."""

from __future__ import annotations

import torch
from torch import Tensor


def add_second_moment(total: Tensor, x: Tensor) -> None:
    """Add ``x^T x`` to the upper triangle of ``total`` [K, K], x [T, K]; ``mirror`` finally fills the lower one."""
    k = x.shape[1]
    step = max(256, -(-k // 8))
    for start in range(0, k, step):
        stop = min(start + step, k)
        total[start:stop, start:].addmm_(x[:, start:stop].T, x[:, start:])


def mirror(total: Tensor) -> Tensor:
    """Copy the upper triangle of ``total`` [K, K] to the lower, in place and in pieces; returns ``total``."""
    k = len(total)
    step = 1024
    for start in range(0, k, step):
        stop = min(start + step, k)
        square = total[start:stop, start:stop]
        square.copy_(torch.triu(square) + torch.triu(square, 1).T)
        total[stop:, start:stop] = total[start:stop, stop:].T
    return total
