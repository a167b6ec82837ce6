"""Hadamard rotation of the inputs of a linear layer, as QuaRot (Ashkboos et al. 2024, arXiv:2404.00456) computes it.

For K = p * 2**m inputs, the matrix is the Kronecker product of a Hadamard matrix of order p and Sylvester's of order
2**m, divided by sqrt(K). QuaRot defines p as the first entry of ``ORDERS`` that divides K, else 1, and has one matrix
for each p: the constructions of Paley (1933) and Williamson (1944) below reproduce them.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

#: Orders p in the sequence in which they are tried.
ORDERS = (172, 156, 140, 108, 60, 52, 36, 28, 40, 20, 12)

#: The product with the matrix of order p has a multiple of this many rows; see ROW_MULTIPLE in ops/linear.py.
_ROWS = 16
#: Order p -> first rows of the four symmetric circulant blocks of Williamson's construction.
_WILLIAMSON = {
    52: ("+-+--++++--+-", "+---++++++---", "++-+--++--+-+", "+----+--+----"),
    156: (
        "+++--+-+-----+--++----++--+-----+-+--++",
        "++++---+--++----+-+--+-+----++--+---+++",
        "+++--++-+---+-+--+----+--+-+---+-++--++",
        "+---++-+-+-----+++-++-+++-----+-+-++---",
    ),
    172: (
        "+---++--++++-+-+++-++--++-+++-+-++++--++---",
        "++-++++++----+-+--++-++-++--+-+----++++++-+",
        "+++-+-++--+-+-++++-+----+-++++-+-+--++-+-++",
        "++---++++-+--+--++--------++--+--+-++++---+",
    ),
}
#: The signed blocks in the four rows of Williamson's construction.
_QUATERNION = ((1, 2, 3, 4), (-2, 1, -4, 3), (-3, 4, 1, -2), (-4, -3, 2, 1))


def factors(size: int) -> tuple[int, int] | None:
    """Return p and 2**m for ``size`` inputs, or None if there is no such matrix."""
    order = next((order for order in ORDERS if size % order == 0), 1)
    power = size // order
    return (order, power) if power > 0 and power & (power - 1) == 0 else None


@functools.cache
def matrix(order: int) -> Tensor:
    """Return the matrix [p, p] float32 of elements 1 and -1; ``order`` is one of ORDERS."""
    if order in _WILLIAMSON:
        blocks = [_circulant([1 if sign == "+" else -1 for sign in row]) for row in _WILLIAMSON[order]]
        rows = [torch.cat([math.copysign(1, i) * blocks[abs(i) - 1] for i in row], 1) for row in _QUATERNION]
        return torch.cat(rows)
    if order == 40:
        return torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix(20))
    return _paley_symmetric(order) if order in (28, 36) else _paley(order)


def _circulant(row: list[int]) -> Tensor:
    """Return the matrix whose row i is ``row`` rolled by i."""
    first = torch.tensor(row, dtype=torch.float32)
    return torch.stack([first.roll(shift) for shift in range(len(row))])


def _jacobsthal(q: int) -> Tensor:
    """Return the matrix [q, q] of quadratic characters of j - i for a prime q."""
    squares = {i * i % q for i in range(1, q)}
    return _circulant([0] + [1 if i in squares else -1 for i in range(1, q)])


def _paley(order: int) -> Tensor:
    """Paley's first construction, for a prime order - 1 that is 3 modulo 4."""
    result = torch.ones(order, order)
    result[0, 1:] = -1
    result[1:, 1:] = torch.eye(order - 1) - _jacobsthal(order - 1)
    return result


def _paley_symmetric(order: int) -> Tensor:
    """Paley's second construction, for a prime order / 2 - 1 that is 1 modulo 4."""
    half = order // 2
    conference = torch.ones(half, half)
    conference[0, 0] = 0
    conference[1:, 1:] = _jacobsthal(half - 1)
    one = torch.eye(half)
    upper = torch.cat([conference + one, conference - one], 1)
    return torch.cat([upper, torch.cat([conference - one, -conference - one], 1)])


def rotate(x: Tensor, inverse: bool = False) -> Tensor:
    """Multiply the rows of x [M, K] by the rotation, or by its inverse, in float32 -> [M, K] of the same dtype.

    A row's result does not depend on the other rows on a CPU. K must have ``factors``.
    """
    m, k = x.shape
    sizes = factors(k)
    assert sizes is not None, k
    order, power = sizes
    y = x.to(torch.float32)
    stride = 1
    while stride < power:
        pairs = y.reshape(-1, 2, stride)
        y = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
        stride *= 2
    if order > 1:
        base = matrix(order).to(x.device)
        columns = y.reshape(m, order, power).transpose(1, 2).reshape(-1, order)
        rows = len(columns)
        columns = F.linear(F.pad(columns, (0, 0, 0, -rows % _ROWS)), base.T if inverse else base)[:rows]
        y = columns.reshape(m, power, order).transpose(1, 2)
    return (y.reshape(m, k) * k**-0.5).to(x.dtype)
