"""Unquantized linear layers: interface, torch reference and implementations.

An implementation is a module with

    supports(problem: DenseProblem) -> None, or one sentence why not
    prepare(weight: Tensor, bias: Tensor | None, problem: DenseProblem) -> DenseLayer
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.registry import Registry
from aiakq.kernels.types import DenseProblem, LinearInput

IMPLEMENTATIONS = Registry(
    "aiakq.implementations.dense",
    {"cpu": "aiakq.kernels.cpu.dense", "torch": "aiakq.kernels.ops.dense"},
    plugins_first=True,
)


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


def supports(problem: DenseProblem) -> str | None:
    """None: the reference supports every problem."""
    return None


def prepare(weight: Tensor, bias: Tensor | None, problem: DenseProblem) -> TorchDense:
    """Return the reference; weight [N, K] and bias [N] are copied only if they need another dtype."""
    return TorchDense(weight.to(problem.dtype), None if bias is None else bias.to(problem.dtype))
