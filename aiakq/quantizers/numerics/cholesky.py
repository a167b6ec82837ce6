"""Cholesky factors of a damped Hessian.

``H = R R^T`` with R upper triangular, and its inverse U, for which ``H^-1 = U^T U``: the factor that the GPTQ loop
uses. The published code inverts H and factors the inverse, twice the work, all of it in LAPACK. Here H is factored
backwards from its last column and the factor is inverted, blocked so that nearly all work is matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Columns of a block, which LAPACK factors on one thread.
BLOCK = 256
#: Number of times that the damping is doubled before a layer falls back to RTN; 0.01 grows to 2.56.
_DOUBLINGS = 8


def factors(hessian: Tensor, order: Tensor | None, damp: float) -> tuple[Tensor, Tensor, float] | None:
    """Return R and U [K, K] float32 of the damped Hessian, and the damping used; None if the factorization fails.

    The Hessian is ``hessian`` [K, K] with its columns in ``order``; inputs that were never active get the mean of its
    diagonal. float32 is tried first, then float64, then increasing damping.
    """
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    if not bool(torch.isfinite(diagonal).all()) or bool(dead.all()):
        return None
    mean = diagonal[~dead].mean()
    if order is not None:
        dead = dead[order]
    attempts = [(torch.float32, damp), *((torch.float64, damp * 2**i) for i in range(_DOUBLINGS + 1))]
    for dtype, amount in attempts:
        base = hessian.to(dtype, copy=True) if order is None else hessian[order][:, order].to(dtype)
        base.diagonal()[dead] = mean.to(dtype)
        base.diagonal().add_(mean, alpha=amount)
        factored = _factored(base)
        del base
        if factored is not None:
            return *factored, amount
    return None


def _factored(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return R, which overwrites ``matrix`` [K, K], and U; both float32. None if it is not positive definite.

    At most these two matrices are alive at a time.
    """
    k = len(matrix)
    starts = range(0, k, BLOCK)
    inverses = {}
    for start in reversed(starts):
        block = slice(start, min(start + BLOCK, k))
        with one_thread():
            # LAPACK factors from the first column on: flip the block to factor from the last.
            lower, failed = torch.linalg.cholesky_ex(matrix[block, block].flip(0, 1))
            upper = lower.flip(0, 1)
            if bool(failed) or not bool(torch.isfinite(upper).all() and (upper.diagonal() > 0).all()):
                return None
            inverse = torch.linalg.solve_triangular(upper, torch.eye(len(upper)).to(upper), upper=True)
        matrix[block, block], matrix[block, :start] = upper, 0
        inverses[start] = inverse
        above = matrix[:start, block]
        above.copy_(above @ inverse.T)
        for first in range(0, start, BLOCK):
            columns = slice(first, first + BLOCK)
            matrix[: columns.stop, columns].addmm_(above[: columns.stop], above[columns].T, alpha=-1)
    upper = torch.zeros_like(matrix)
    for start, inverse in sorted(inverses.items()):
        block = slice(start, start + len(inverse))
        upper[block, block] = inverse
        above = matrix[:start, block] @ inverse
        for first in range(0, start, BLOCK):
            rows = slice(first, first + BLOCK)
            upper[rows, block] = torch.mm(upper[rows, first:start], above[first:]).neg_()
    return matrix.to(torch.float32), upper.to(torch.float32)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, because the last bits of LAPACK's results depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
