"""Unquantized linear layers: interface, torch reference and implementations."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import DenseProblem, LinearInput


class DenseLayer(LinearLayer):
    """y = x W^T + b with a float weight W [N, K]."""

    def embedding(self) -> EmbeddingLayer | Tensor:
        """Return a lookup of the rows of W for a tied embedding, or W [N, K] itself to build one from."""
        raise NotImplementedError


class TorchDense(DenseLayer):
    """The reference; ``weight`` [N, K] and ``bias`` [N] are in the dtype of the activations."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: LinearInput) -> Tensor:
        """x [..., K] -> [..., N]."""
        assert isinstance(x, Tensor)
        return F.linear(x, self.weight, self.bias)

    def embedding(self) -> Tensor:
        """W [N, K]; see DenseLayer."""
        return self.weight


class DenseKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, weight: Tensor, bias: Tensor | None, problem: DenseProblem) -> DenseLayer:
        """Bind a layer with ``weight`` [N, K] and ``bias`` [N]."""


IMPLEMENTATIONS = Implementations[DenseKernel].of_backends("dense", "cpu")


def prepare(weight: Tensor, bias: Tensor | None, problem: DenseProblem) -> TorchDense:
    """Return the reference; weight [N, K] and bias [N] are copied only if they need another dtype."""
    return TorchDense(weight.to(problem.dtype), None if bias is None else bias.to(problem.dtype))
