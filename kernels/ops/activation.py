"""Activation functions, alone or as the gate of other columns: interface, reference in torch, implementations.

An implementation is a module with

    supports(problem: ActivationProblem) -> None, or one sentence why not
    prepare(problem: ActivationProblem) -> Activation
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.registry import Registry
from aiakq.kernels.types import ActivationLayout, ActivationProblem, LinearInput

IMPLEMENTATIONS = Registry(
    "aiakq.implementations.activation",
    {
        "cpu": "aiakq.kernels.cpu.activation",
        "triton": "aiakq.kernels.triton.activation",
        "torch": "aiakq.kernels.ops.activation",
    },
    plugins_first=True,
)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
}


class Activation(Protocol):
    """One activation function. ``layout`` is that of the linear layer behind, as for Norm."""

    def __call__(self, x: Tensor, layout: ActivationLayout | None = None) -> LinearInput:
        """act(x) of x [M, I]."""

    def gated(self, x: Tensor, layout: ActivationLayout | None = None) -> LinearInput:
        """act of the first half of the columns times the second half: x [M, 2 I] -> [M, I]."""


class TorchActivation:
    """The reference.

    On a CPU torch computes the last elements of a tensor that do not fill a vector register in another way, so a row's
    result depends on the number of rows.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, x: Tensor, layout: ActivationLayout | None = None) -> Tensor:
        """See Activation."""
        return self.function(x)

    def gated(self, x: Tensor, layout: ActivationLayout | None = None) -> Tensor:
        """act of the first half of the columns times the second half: x [M, 2 I] -> [M, I]."""
        gate, up = x.chunk(2, dim=-1)
        return self.function(gate) * up


def supports(problem: ActivationProblem) -> str | None:
    """None: the reference supports every problem."""
    return None


def prepare(problem: ActivationProblem) -> TorchActivation:
    """The function that ``problem`` names."""
    return TorchActivation(FUNCTIONS[problem.function])
