"""Scaling, soft-capping and addition of activations: interface, torch reference and implementations.

Covers scaled embeddings, residuals and logits, soft-capped logits, and the sums of blocks whose attention and MLP run
in parallel.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import ScalingProblem


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


class ScalingKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, scale: float, cap: float | None, factors: Tensor | None, problem: ScalingProblem) -> Scaling:
        """Bind softcap(scale * x) + added; ``factors`` [positions] float32, or None."""


IMPLEMENTATIONS = Implementations[ScalingKernel].of_backends("scaling", "cpu")


def prepare(scale: float, cap: float | None, factors: Tensor | None, problem: ScalingProblem) -> TorchScaling:
    """Return the reference; factors [positions] float32, or None."""
    return TorchScaling(scale, cap, factors)
