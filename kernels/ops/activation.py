"""Activation functions, plain and gated: interface, torch reference and implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import ActivationLayout, ActivationProblem, LinearInput


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _clamped_swish(x: Tensor) -> Tensor:
    return _quick_gelu(x.clamp(max=CLAMP))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": _relu2,
    "quick_gelu": _quick_gelu,
    "sigmoid": torch.sigmoid,
    "clamped_swiglu": _clamped_swish,
}
#: Bound at which clamped_swiglu clamps the gate (from above) and the other half (on both sides), as in gpt-oss.
CLAMP = 7.0


class Activation(Protocol):
    """One activation function. ``layout`` is the input layout of the next linear layer, as in Norm."""

    def __call__(self, x: Tensor, layout: ActivationLayout | None = None) -> LinearInput:
        """Return act(x) for x [M, I]."""

    def gated(self, x: Tensor, layout: ActivationLayout | None = None) -> LinearInput:
        """Return act(first half of the columns) * second half: x [M, 2 I] -> [M, I].

        clamped_swiglu also clamps the second half and adds one to it.
        """


class TorchActivation:
    """The torch reference.

    On a CPU torch handles the tail of a tensor that does not fill a vector register with different code, so a row's
    result depends on the number of rows.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, x: Tensor, layout: ActivationLayout | None = None) -> Tensor:
        """See Activation."""
        return self.function(x)

    def gated(self, x: Tensor, layout: ActivationLayout | None = None) -> Tensor:
        """Return act(first half of the columns) * second half: x [M, 2 I] -> [M, I]."""
        gate, up = x.chunk(2, dim=-1)
        return self.function(gate) * (up.clamp(-CLAMP, CLAMP) + 1 if self.function is _clamped_swish else up)


class ActivationKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, problem: ActivationProblem) -> Activation:
        """Bind the operation of one layer."""


IMPLEMENTATIONS = Implementations[ActivationKernel].of_backends("activation", "cpu", "triton")


def prepare(problem: ActivationProblem) -> TorchActivation:
    """Return the activation function that ``problem`` names."""
    return TorchActivation(FUNCTIONS[problem.function])
