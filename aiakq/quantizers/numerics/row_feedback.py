"""Rounding with feedback along rows: later outputs make up for the errors of earlier ones (YAQA, arXiv:2505.22988).

The loss of GPTQ, ``tr(D H D^T)`` for the error ``D = W - Q``, counts all outputs alike. The KL divergence at the end
of the model is nearer to ``tr(F D H D^T)`` with a factor F [N, N] of the outputs, the second moment of the gradients
there. A row still has the same best codes if F is diagonal. Otherwise the best target of a row depends on the errors of
the others, as that of a column does in GPTQ: with ``F^-1 = U^T U`` the rows that follow a block of rows b, whose errors
are E, should move by ``-U_b'^T U_bb^-T E``, where U_b' are the columns of U behind the block.

YAQA does that for every weight. Here the rows of a block are rounded at the same time by the whole solver, which is as
fast as without feedback, except for N^2 K operations. Rows with the largest factor come first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.quantizers.numerics.cholesky import one_thread
from aiakq.quantizers.numerics.gptq import GptqResult, GptqSolver

#: Rows that are rounded at the same time, without feedback among them.
ROWS = 32
#: Damping of the factor, as a fraction of its mean diagonal.
DAMP = 0.1


def round_with_rows(solver: GptqSolver, weight: Tensor, shift: Tensor | None, factor: Tensor) -> GptqResult:
    """Round ``weight`` [N, K] float32 like ``solver.round``, with feedback along rows; nothing is modified.

    ``factor`` [N, N] float32: the second moment of the gradients at the outputs, up to a scale.
    """
    order = torch.argsort(factor.diagonal(), descending=True, stable=True)
    upper = row_factor(factor, order)
    if upper is None or solver.damp is None:
        return solver.round(weight, shift)
    targets = solver.target(weight, shift)[order]
    results = []
    for start in range(0, len(targets), ROWS):
        stop = min(start + ROWS, len(targets))
        result = solver.round(targets[start:stop], drifts=False)
        results.append(result)
        error = targets[start:stop] - solver.values(result)
        moves = torch.linalg.solve_triangular(upper[start:stop, start:stop].T, error, upper=False)
        targets[stop:].addmm_(upper[start:stop, stop:].T, moves, alpha=-1)
    places = torch.argsort(order)
    codes, scales, zeros = (
        torch.cat([getattr(result, name) for result in results])[places] for name in ("codes", "scales", "zeros")
    )
    return GptqResult(codes, scales, zeros, solver.damp)


def row_factor(factor: Tensor, order: Tensor) -> Tensor | None:
    """Return U [N, N] float32, upper triangular, with ``U^T U`` the inverse of the damped factor, whose rows are in
    ``order``; None if there is no feedback: no gradient was seen, or it is not finite."""
    mean = factor.diagonal().mean()
    if not bool(torch.isfinite(mean)) or not float(mean) > 0:
        return None
    damped = factor[order][:, order].double()
    damped.diagonal().add_(mean.double(), alpha=DAMP)
    with one_thread():
        lower, failed = torch.linalg.cholesky_ex(damped)
        if bool(failed):
            return None
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if bool(failed) else upper.float()
