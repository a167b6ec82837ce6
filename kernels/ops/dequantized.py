"""Linear layers whose weights are dequantized once at load time and multiplied with torch.

Results equal those of the reference; memory is that of an unquantized model. The loader allows this only where it fits
(``--dequantize``), and it helps only where no kernel computes on the packed weights.
"""

from __future__ import annotations

from aiakq.kernels.ops.dense import TorchDense
from aiakq.kernels.ops.linear import LinearLayer, RoundedInputs
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.types import LinearProblem, QWeight

HAS_OFFSETS = True


def supports(problem: LinearProblem) -> str | None:
    """Support every scheme but w8a8, which keeps its integer product, which is faster than a float one."""
    if problem.scheme == "w8a8":
        return "the integer product is faster than a dense float one"
    return None


def prepare(weight: QWeight, problem: LinearProblem) -> LinearLayer:
    """Dequantize once to [N, K] and [N] in the dtype of the activations. ``weight`` is not modified."""
    bias = None if weight.bias is None else weight.bias.to(problem.dtype)
    dense = TorchDense(dequantize(weight, problem.dtype), bias)
    return RoundedInputs(dense, weight.input_scale, weight.rounding) if weight.scheme == "fp8a8" else dense
