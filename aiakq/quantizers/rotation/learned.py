"""Learned rotations without data: the fourth powers of the rotated weights are minimized (OptRot, arXiv:2512.24124).

A rotation keeps the sum of squares of a matrix; the sum of fourth powers is smaller the fewer outliers it has. It is
minimized over orthogonal matrices by conjugate gradients, in a fixed number of steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Steps of the optimization.
STEPS = 50
#: Rotation angle of the largest row of the first step's direction.
_FIRST_STEP = 0.2
#: Iterations of a retraction, and the largest deviation of its result from an orthogonal matrix.
_NEWTON_STEPS = 6
_ORTHOGONAL = 1e-10
#: Attempts with half the step size.
_ATTEMPTS = 8


def learned_rotation(rows: Tensor, start: Tensor, keeps_ones: bool = False, steps: int = STEPS) -> Tensor:
    """Return an orthogonal R [n, n] float32 with a small sum of fourth powers of ``rows R``.

    rows        [T, n] float32: rows of all weights that R multiplies.
    start       [n, n] float32 orthogonal, where the search starts.
    keeps_ones  whether R maps the vector of ones to itself, as ``start`` then must.
    """
    rotation = start.to(rows.device, torch.float64)
    rotated = rows @ rotation.to(rows.dtype)
    loss = _loss(rotated)
    size = _FIRST_STEP
    before: Tensor | None = None
    direction: Tensor | None = None
    for _ in range(steps):
        slope = _slope(rotated, keeps_ones)
        direction = _conjugate(slope, before, direction)
        before = slope
        largest = direction.norm(dim=1).max()
        if not float(largest) > 0:
            break
        for _ in range(_ATTEMPTS):
            turn = _retraction(direction * (size / largest))
            turned = rotated @ turn.to(rows.dtype)
            changed = _loss(turned)
            if changed < loss:  # not, if the retraction did not converge
                break
            size /= 2
        else:
            break
        gain = 1 - changed / loss
        rotated, loss, rotation = turned, changed, rotation @ turn
        size *= 1.5
        if gain < 1e-6:
            break
    return rotation.float()


def _loss(x: Tensor) -> float:
    """Return the mean of fourth powers, in an order that does not depend on the number of threads."""
    return float(x.square().square().sum(-1).cpu().numpy().mean())


def _slope(rotated: Tensor, keeps_ones: bool) -> Tensor:
    """Return the direction of steepest descent at the identity, a skew-symmetric [n, n]."""
    gradient = (rotated.T @ rotated.pow(3)).double()
    slope = gradient.T - gradient
    if keeps_ones:
        slope = slope - slope.mean(0, keepdim=True)
        slope = slope - slope.mean(1, keepdim=True)
    return slope


def _conjugate(slope: Tensor, before: Tensor | None, direction: Tensor | None) -> Tensor:
    """Return the next search direction (Polak and Ribiere), or the steepest descent if that does not descend."""
    if before is None or direction is None:
        return slope
    share = max(0.0, _dot(slope, slope - before) / _dot(before, before))
    conjugate = slope + share * direction
    return conjugate if _dot(conjugate, slope) > 0 else slope


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(-1).cpu().numpy().sum())


def _retraction(skew: Tensor) -> Tensor:
    """Return the orthogonal matrix nearest to ``1 + S + S^2 / 2`` for a skew-symmetric S [n, n] float64, or NaN if S is
    too large. Newton's iteration consists of products alone, whose bits do not depend on the number of threads."""
    one = torch.eye(len(skew), dtype=skew.dtype, device=skew.device)
    turn = one + skew + skew @ skew / 2
    for _ in range(_NEWTON_STEPS):
        gap = turn.T @ turn - one
        turn = turn - turn @ gap / 2
    converged = float((turn.T @ turn - one).abs().max()) < _ORTHOGONAL
    return turn if converged else torch.full_like(turn, torch.nan)
