"""Muon with products in float32: those of torch.optim.Muon are in bfloat16, which takes most CPUs 14 times as long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

#: Coefficients of the Newton-Schulz iteration of Muon, its steps, and the momentum (kellerjordan.github.io/posts/muon).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices [N, K] float32, with steps as large as those of AdamW (arXiv 2502.16982)."""

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(list(matrices), {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient in place; ``closure`` is not called."""
        for group in self.param_groups:
            rate = group["lr"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                state["momentum"].lerp_(matrix.grad, 1 - MOMENTUM)
                update = orthogonalized(matrix.grad.lerp(state["momentum"], MOMENTUM))
                matrix.mul_(1 - rate * group["weight_decay"])
                matrix.add_(update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return a matrix [N, K] like ``matrix``, with singular values of about 1, by a Newton-Schulz iteration."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    linear, cubic, quintic = COEFFICIENTS
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), wide, beta=linear)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
