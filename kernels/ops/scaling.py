"""Scaling, soft-capping and addition of activations: interface, torch reference and implementations.

Covers scaled embeddings, residuals and logits, soft-capped logits, and the sums of blocks whose attention and MLP run
in parallel. An implementation is a module with

    supports(problem: ScalingProblem) -> None, or one sentence why not
    prepare(scale: float, cap: float | None, factors: Tensor | None, problem: ScalingProblem) -> Scaling
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.registry import Registry
from aiakq.kernels.types import ScalingProblem

IMPLEMENTATIONS = Registry(
    "aiakq.implementations.scaling",
    {"cpu": "aiakq.kernels.cpu.scaling", "torch": "aiakq.kernels.ops.scaling"},
    plugins_first=True,
)


class Scaling(Protocol):
    """softcap(scale * factors[position] * x) + added, with softcap(v) = cap * tanh(v / cap); in float32, rounded once.

    factors  [positions] float32, one for each position; None for 1.
    """

    def __call__(
        self, x: Tensor, added: Tensor | None = None, *, positions: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x [M, D] and added [M, D] -> [M, D] of the same dtype, written to ``out`` [M, D] if given, which may alias an
        input.

        positions  [M] int64, indices into the factors.
        """


class TorchScaling:
    """The torch reference."""

    def __init__(self, scale: float, cap: float | None, factors: Tensor | None) -> None:
        self.scale, self.cap, self.factors = scale, cap, factors

    def __call__(
        self, x: Tensor, added: Tensor | None = None, *, positions: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x [M, D] -> [M, D]; see Scaling."""
        y = x.to(torch.float32)
        if self.scale != 1:
            y = y * self.scale
        if self.factors is not None:
            assert positions is not None
            y = y * self.factors[positions].unsqueeze(-1)
        if self.cap is not None:
            y = torch.tanh(y / self.cap) * self.cap
        if added is not None:
            y = y + added
        return y.to(x.dtype) if out is None else out.copy_(y)


def supports(problem: ScalingProblem) -> str | None:
    """None: the reference supports every problem."""
    return None


def prepare(scale: float, cap: float | None, factors: Tensor | None, problem: ScalingProblem) -> TorchScaling:
    """Return the reference; factors [positions] float32, or None."""
    return TorchScaling(scale, cap, factors)
