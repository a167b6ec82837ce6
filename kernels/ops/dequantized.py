"""Linear layers whose weights are dequantized once, at load, and multiplied with torch.

The result is the reference's; the memory is that of an unquantized model. The loader allows it only where that fits
(``--dequantize``), and it matters only where no kernel computes on the packed weights.
"""

from __future__ import annotations

from aiakq.kernels.ops.dense import TorchDense
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.types import LinearProblem, QWeight


def supports(problem: LinearProblem) -> str | None:
    """Weight-only schemes; w8a8 keeps its integers, which are faster than floats."""
    if problem.scheme == "w8a8":
        return "the integer product is faster than a dense float one"
    return None


def prepare(weight: QWeight, problem: LinearProblem) -> TorchDense:
    """Expand once to [N, K] and [N] in the dtype of the activations. ``weight`` is not modified."""
    bias = None if weight.bias is None else weight.bias.to(problem.dtype)
    return TorchDense(dequantize(weight, problem.dtype), bias)
