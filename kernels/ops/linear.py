"""Linear layers with quantized weights: interface and implementations in order of preference.

An implementation is a module with

    supports(problem: LinearProblem) -> None, or one sentence why not
    prepare(weight: QWeight, problem: LinearProblem) -> LinearLayer

``prepare`` repacks the weight into a private layout; the canonical copy may then be freed. The reference, which
supports every problem, is linear_reference.py.
"""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType

from torch import Tensor

from aiakq.kernels.hadamard import rotate
from aiakq.kernels.registry import Registry
from aiakq.kernels.selection import Selection, select
from aiakq.kernels.types import ActivationLayout, LinearInput, LinearProblem

#: On a CPU, the number of rows is padded to this multiple for implementations in which a row's result would otherwise
#: depend on it: BLAS sums in another order for few rows, on some processors for fewer than twelve
#: (docs/decisions/0003). An implementation whose rows are independent defines ROW_MULTIPLE = 1.
ROW_MULTIPLE = 16

#: Name -> module. Plugins add theirs as entry points, which take precedence.
IMPLEMENTATIONS = Registry(
    "aiakq.implementations",
    {
        "cpu": "aiakq.kernels.cpu.linear",
        "triton": "aiakq.kernels.triton.linear",
        "triton-w8a8": "aiakq.kernels.triton.linear_int8",
        "dequantized": "aiakq.kernels.ops.dequantized",
        "reference": "aiakq.kernels.ops.linear_reference",
    },
    plugins_first=True,
)


class LinearLayer:
    """Base class of what ``prepare`` returns: a linear layer with its weight in the implementation's layout.

    has_local_outputs, has_local_inputs  whether the layer has only a tensor-parallel rank's outputs or inputs, see
                                         ops/parallel.py.
    """

    has_local_outputs = has_local_inputs = False

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] as a Tensor or in the layout of ``input_layout(M)`` -> [M, N] of the same dtype."""
        raise NotImplementedError

    def input_layout(self, m: int) -> ActivationLayout | None:
        """Return the preferred input layout for M rows, or None for a plain Tensor."""
        return None


class RotatedLinear(LinearLayer):
    """A linear layer whose weight was quantized for rotated inputs: rotates its input, then applies ``inner``."""

    def __init__(self, inner: LinearLayer) -> None:
        self._inner = inner

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K], a Tensor -> [M, N]."""
        assert isinstance(x, Tensor)
        return self._inner(rotate(x))


def explain(problem: LinearProblem, exclude: Collection[str] = ()) -> Selection:
    """Return the selection for ``problem``, including why better implementations were passed over; prepares nothing."""
    return implementation(problem, exclude)[0]


def implementation(problem: LinearProblem, exclude: Collection[str] = ()) -> tuple[Selection, ModuleType]:
    """Return the selection for ``problem`` and the selected module."""
    return select("linear", IMPLEMENTATIONS, problem, exclude)
