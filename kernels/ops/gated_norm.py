"""Grouped RMS norm with a gate: interface, torch reference and implementations.

Applied after the recurrence in Mamba 2, Qwen3-Next and MiniMax.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.ops.convolution import sigmoid
from aiakq.kernels.recurrent_types import GatedNormProblem
from aiakq.kernels.selection import Implementations


class GatedNorm(Protocol):
    """norm(x) * weight * silu(gate), or norm(x * silu(gate)) * weight if ``gate_first``; in float32, rounded once.

    If ``sigmoid``, the factor is sigmoid(gate) instead of silu(gate).
    """

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [M, D] and gate [M, D] -> [M, D] of x's dtype."""


class TorchGatedNorm:
    """The torch reference; ``weight`` [D]."""

    def __init__(self, weight: Tensor, epsilon: float, problem: GatedNormProblem) -> None:
        self.weight, self.epsilon = weight.float(), epsilon
        self.group, self.gate_first, self.sigmoid = problem.group, problem.gate_first, problem.sigmoid

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [M, D] and gate [M, D] -> [M, D]; see GatedNorm."""
        wide = gate.float()
        factor = sigmoid(wide) if self.sigmoid else wide * sigmoid(wide)
        values = x.float() * factor if self.gate_first else x.float()
        groups = values.unflatten(-1, (-1, self.group))
        normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.epsilon)).flatten(-2) * self.weight
        return (normed if self.gate_first else normed * factor).to(x.dtype)


class GatedNormKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, weight: Tensor, epsilon: float, problem: GatedNormProblem) -> GatedNorm:
        """Bind a norm with ``weight`` [D]."""


IMPLEMENTATIONS = Implementations[GatedNormKernel].of_backends("gated_norm", "cpu", "triton")


def prepare(weight: Tensor, epsilon: float, problem: GatedNormProblem) -> TorchGatedNorm:
    """Return the reference with ``weight`` [D]."""
    return TorchGatedNorm(weight, epsilon, problem)
