"""Linear layers without quantization: interface, torch reference and implementations.

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
    """y = x W^T + b with W [N, K] in floats."""

    def embedding(self) -> EmbeddingLayer | Tensor:
        """The rows of W as an embedding, for a head tied to it: a lookup, or W [N, K] itself to make one of."""
        raise NotImplementedError


class TorchDense(DenseLayer):
    """``weight`` [N, K] and ``bias`` [N] in the dtype of the activations."""

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
    """weight [N, K] and bias [N] are copied only if they are of another dtype than the activations."""
    return TorchDense(weight.to(problem.dtype), None if bias is None else bias.to(problem.dtype))
