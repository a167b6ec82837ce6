"""Linear layers with quantized weights: interface, and implementations in order of preference.

An implementation is a module with

    supports(problem: LinearProblem) -> None, or one sentence why not
    prepare(weight: QWeight, problem: LinearProblem) -> LinearLayer

``prepare`` brings the weight into a layout of its own; the canonical copy may then be dropped. The reference, which
supports every problem, is linear_reference.py.
"""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType

from torch import Tensor

from aiakq.kernels.registry import Registry
from aiakq.kernels.selection import Selection, select
from aiakq.kernels.types import ActivationLayout, LinearInput, LinearProblem

#: Rows of activations come in multiples of this where an implementation needs it, so that a row's result does not
#: depend on how many others there are: on a CPU, BLAS sums in another order for few rows, on some processors for fewer
#: than twelve (docs/decisions/0003). An implementation whose rows never depend on each other says ROW_MULTIPLE = 1.
ROW_MULTIPLE = 16

#: Name -> module. Packages add theirs as entry points; those are asked first.
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
    """A linear layer whose weight is in the layout of its implementation. Base class of what ``prepare`` returns."""

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] as a Tensor or in the layout of ``input_layout(M)`` -> [M, N] of the same dtype."""
        raise NotImplementedError

    def input_layout(self, m: int) -> ActivationLayout | None:
        """The layout in which this layer takes M rows most readily, or None for a plain Tensor."""
        return None

    def feeds(self, other: LinearLayer, parts: int) -> None:
        """Said once when a model is built: ``other`` alone reads what this layer computes, after an elementwise
        function of ``parts`` equal parts of it side by side. Ranks may then keep what is between to themselves.
        """


def explain(problem: LinearProblem, exclude: Collection[str] = ()) -> Selection:
    """Which implementation would run ``problem``, and why not a better one; prepares nothing."""
    return implementation(problem, exclude)[0]


def implementation(problem: LinearProblem, exclude: Collection[str] = ()) -> tuple[Selection, ModuleType]:
    """The selected implementation and its module."""
    return select("linear", IMPLEMENTATIONS, problem, exclude)
