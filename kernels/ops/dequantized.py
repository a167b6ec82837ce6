"""Quantized weights expanded to the activation dtype once, at load, and multiplied by the dense library.

The answer is the reference's; the memory is that of an unquantized model. The loader allows it only where that fits
(``--dequantize``), and only matters until a native kernel computes on the packed weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.ops import linear_reference as reference
from aiakq.kernels.types import LinearProblem, QWeight


@dataclass
class DenseLinear:
    """weight [N, K] and bias [N] in the activation dtype."""

    weight: Tensor
    bias: Tensor | None


def supports(problem: LinearProblem) -> str | None:
    """Weight-only schemes; w8a8 keeps its integers, which are faster than floats."""
    if problem.scheme == "w8a8":
        return "the integer product is faster than a dense float one"
    return None


def prepare(weight: QWeight, problem: LinearProblem) -> DenseLinear:
    """Expand once. ``weight`` is not modified."""
    bias = None if weight.bias is None else weight.bias.to(problem.dtype)
    return DenseLinear(reference.dequantize(weight, problem.dtype), bias)


def run(x: Tensor, state: DenseLinear) -> Tensor:
    """x [M, K] -> [M, N]."""
    return F.linear(x, state.weight, state.bias)
