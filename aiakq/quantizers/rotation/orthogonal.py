"""Orthogonal matrices: randomized Hadamard transforms of any size, and dense ones.

A Hadamard transform spreads every channel evenly over all others (Ashkboos et al. 2024, arXiv:2404.00456). Products are
computed in float64 and rounded to float32 once, so that their bits do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Elements that are transformed at a time.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Hadamard:
    """A randomized Hadamard transform of size n = 2^k * m: the Kronecker product of a Hadamard matrix and a ``block``.

    block      [m, m] float64 orthogonal, its first column constant.
    signs      [n] float64 of 1 and -1.
    keeps_ones whether the vector of ones is mapped to itself, as LayerNorm requires.
    """

    block: Tensor
    signs: Tensor
    keeps_ones: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """Return ``x R`` for x [..., n] float32: ``diag(signs) H``, or with ``keeps_ones`` ``H diag(signs) H^T``."""
        block, signs = self.block.to(x.device), self.signs.to(x.device)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows, dtype=torch.float32)
        step = max(1, _CHUNK // x.shape[-1])
        for start in range(0, len(rows), step):
            part = rows[start : start + step].double()
            if self.keeps_ones:
                part = _transform(_transform(part, block) * signs, block.T)
            else:
                part = _transform(part * signs, block)
            out[start : start + step] = part
        return out.view(x.shape)

    def tensors(self) -> list[Tensor]:
        """Return what ``orthogonal_of`` restores it from."""
        return [self.block, self.signs, torch.tensor([float(self.keeps_ones)])]


@dataclass(frozen=True)
class Dense:
    """An orthogonal matrix [n, n] float32."""

    matrix: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Return ``x R`` for x [..., n] float32."""
        matrix = self.matrix.to(x.device, torch.float64)
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows, dtype=torch.float32)
        step = max(64, _CHUNK // x.shape[-1])
        for start in range(0, len(rows), step):
            out[start : start + step] = rows[start : start + step].double() @ matrix
        return out.view(x.shape)

    def tensors(self) -> list[Tensor]:
        """Return what ``orthogonal_of`` restores it from."""
        return [self.matrix]


Orthogonal = Hadamard | Dense


def orthogonal_of(tensors: Sequence[Tensor]) -> Orthogonal:
    """Return the rotation with these ``tensors``."""
    if len(tensors) == 1:
        return Dense(tensors[0])
    block, signs, keeps_ones = tensors
    return Hadamard(block, signs, bool(keeps_ones))


def random_hadamard(n: int, generator: torch.Generator, keeps_ones: bool = False) -> Hadamard:
    """Return a Hadamard transform of size n with random signs.

    Its block is the smallest Hadamard matrix by which n is a power of two; if none is known, a random orthogonal matrix
    of the size of n's odd factor.
    """
    signs = torch.randint(2, (n,), generator=generator).double() * 2 - 1
    signs[0] = 1.0
    odd = n
    while odd % 2 == 0:
        odd //= 2
    size = odd
    while n % size == 0 and size > 2:
        matrix = hadamard_matrix(size)
        if matrix is not None:
            return Hadamard(matrix / math.sqrt(size), signs, keeps_ones)
        size *= 2
    return Hadamard(_random_block(odd, generator), signs, keeps_ones)


def hadamard_matrix(n: int) -> Tensor | None:
    """Return a Hadamard matrix [n, n] float64 of 1 and -1 whose first column is 1, or None if there is no construction:
    Paley's two for prime orders (Paley 1933).
    """
    if n % 4:
        return None
    if _is_prime(n - 1):
        matrix = _bordered(n - 1, -1.0) + torch.eye(n, dtype=torch.float64)
    elif n % 8 == 4 and _is_prime(n // 2 - 1):
        symmetric = _bordered(n // 2 - 1, 1.0)
        one, two = torch.tensor([[1.0, 1], [1, -1]]).double(), torch.tensor([[1.0, -1], [-1, -1]]).double()
        matrix = torch.kron(symmetric, one) + torch.kron(torch.eye(n // 2, dtype=torch.float64), two)
    else:
        return None
    return matrix * matrix[:, :1]


def _bordered(q: int, lower: float) -> Tensor:
    """Return Jacobsthal's matrix of the prime q, bordered by 1 above and ``lower`` at the left, [q + 1, q + 1]."""
    residues = {x * x % q for x in range(1, q)}
    row = torch.tensor([0.0 if x == 0 else 1.0 if x in residues else -1.0 for x in range(q)], dtype=torch.float64)
    index = torch.arange(q)
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    matrix[0, 1:] = 1.0
    matrix[1:, 0] = lower
    matrix[1:, 1:] = row[(index[:, None] - index[None, :]) % q]
    return matrix


def _is_prime(n: int) -> bool:
    return n > 2 and all(n % factor for factor in range(2, math.isqrt(n) + 1))


def _random_block(m: int, generator: torch.Generator) -> Tensor:
    """Return a random orthogonal matrix [m, m] float64 whose first column is constant."""
    start = torch.randn(m, m, generator=generator, dtype=torch.float64)
    start[:, 0] = 1.0
    basis, triangle = torch.linalg.qr(start)
    block: Tensor = basis * triangle.diagonal().sign()
    return block


def _transform(x: Tensor, block: Tensor) -> Tensor:
    """Return ``x (H kron block)``, x [T, n] float64, H the normalized Hadamard matrix of size n / m."""
    rows, n = x.shape
    m = len(block)
    count = n // m
    half = 1
    while half < count:
        pairs = x.view(rows, count // (2 * half), 2, half * m)
        x = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), 2)
        half *= 2
    if m == 1:
        return x.view(rows, n) / math.sqrt(count)
    return ((x.view(-1, m) @ block) / math.sqrt(count)).view(rows, n)
