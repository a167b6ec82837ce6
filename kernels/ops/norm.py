"""RMS norm and layer norm: interface, torch reference and implementations."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import ActivationLayout, LinearInput, NormProblem


class Norm(Protocol):
    """RMS norm x / rms(x) * weight (Zhang and Sennrich 2019, arXiv:1910.07467), or layer norm
    (x - mean) / deviation * weight + bias; statistics are float32 whatever the dtype of the activations."""

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, layout: ActivationLayout | None = None
    ) -> LinearInput:
        """x [..., D] -> [..., D] of the same dtype.

        residual  [..., D], added to x in place before normalizing.
        layout    input layout of the next linear layer; if the implementation does not know it, the result is a Tensor.
        """


class TorchRMSNorm:
    """The torch reference; ``weight`` [D]."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self.weight, self.epsilon = weight, epsilon

    def __call__(self, x: Tensor, residual: Tensor | None = None, layout: ActivationLayout | None = None) -> Tensor:
        """See Norm."""
        if residual is not None:
            x += residual
        values = x.to(torch.float32)
        values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (self.weight * values.to(x.dtype)).to(x.dtype)


class TorchLayerNorm:
    """The torch reference; ``weight`` and ``bias`` [D]."""

    def __init__(self, weight: Tensor, bias: Tensor | None, epsilon: float) -> None:
        self.weight, self.bias, self.epsilon = weight, bias, epsilon

    def __call__(self, x: Tensor, residual: Tensor | None = None, layout: ActivationLayout | None = None) -> Tensor:
        """See Norm."""
        if residual is not None:
            x += residual
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class NormKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, weight: Tensor, bias: Tensor | None, epsilon: float, problem: NormProblem) -> Norm:
        """Bind a norm with ``weight`` and ``bias`` [D]."""


IMPLEMENTATIONS = Implementations[NormKernel].of_backends("norm", "cpu", "triton")


def prepare(weight: Tensor, bias: Tensor | None, epsilon: float, problem: NormProblem) -> TorchRMSNorm | TorchLayerNorm:
    """Return the reference; weight and bias [D] are in the dtype of the activations."""
    if problem.kind == "rms":
        return TorchRMSNorm(weight, epsilon)
    return TorchLayerNorm(weight, bias, epsilon)
