"""Linear layers with quantized weights: interface and implementations in order of preference.

The reference, which supports every problem, is linear_reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from aiakq.kernels.hadamard import rotate
from aiakq.kernels.ops.block_floats import round_inputs
from aiakq.kernels.ops.embedding import EmbeddingLayer
from aiakq.kernels.selection import Implementations
from aiakq.kernels.types import ActivationLayout, InputRounding, LinearInput, LinearProblem, QWeight

#: On a CPU, the number of rows is padded to this multiple for implementations in which a row's result would otherwise
#: depend on it: BLAS sums in another order for few rows, on some processors for fewer than twelve
#: (docs/decisions/0003). An implementation whose rows are independent defines ROW_MULTIPLE = 1.
ROW_MULTIPLE = 16


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


@dataclass(eq=False)
class ScaledInputs(LinearLayer):
    """Multiplies its input by ``factors`` [K], of the input's dtype, and applies ``inner``."""

    inner: LinearLayer
    factors: Tensor

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K], a Tensor -> [M, N] of the same dtype."""
        assert isinstance(x, Tensor)
        return self.inner(x * self.factors)


@dataclass(eq=False)
class RoundedInputs(LinearLayer):
    """Rounds its input as ``round_inputs`` does, and applies ``inner``."""

    inner: LinearLayer
    input_scale: Tensor | None
    rounding: InputRounding

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K], a Tensor -> [M, N] of the same dtype."""
        assert isinstance(x, Tensor)
        return self.inner(round_inputs(x, self.input_scale, self.rounding).to(x.dtype))


class LinearKernel(Protocol):
    """A module that implements linear layers with quantized weights.

    Weights with offsets are given to it only if it sets ``HAS_OFFSETS = True``, and weights in the blocks or words of a
    file (block_weight.py, word_weight.py) are unpacked before unless it sets ``READS_BLOCKS = True``.
    """

    def prepare(self, weight: QWeight, problem: LinearProblem) -> LinearLayer:
        """Repack a weight into a private layout; the canonical copy may then be freed."""


@runtime_checkable
class LookupLayer(Protocol):
    """A layer whose rows can be looked up."""

    def __call__(self, x: LinearInput) -> Tensor:
        """See LinearLayer."""

    def embedding(self, dtype: torch.dtype) -> EmbeddingLayer:
        """Return the lookup of rows of the weight, decoded to ``dtype``."""


@runtime_checkable
class RowLookup(Protocol):
    """A LinearKernel that can look up rows of some weights."""

    def looks_up_rows(self, weight: QWeight, problem: LinearProblem) -> bool:
        """Whether the layer of ``weight`` is a LookupLayer."""

    def prepare(self, weight: QWeight, problem: LinearProblem) -> LinearLayer:
        """See LinearKernel."""


#: Four of the GPU's backend, for integers, fp8a8, other small floats and w8a8; one dequantizes the weight at load.
IMPLEMENTATIONS = Implementations[LinearKernel](
    "linear",
    {
        "cpu": "aiakq.kernels.cpu.linear",
        "triton": "aiakq.kernels.triton.linear",
        "triton-fp8": "aiakq.kernels.triton.linear_fp8",
        "triton-floats": "aiakq.kernels.triton.linear_floats",
        "triton-w8a8": "aiakq.kernels.triton.linear_int8",
        "dequantized": "aiakq.kernels.ops.dequantized",
        "reference": "aiakq.kernels.ops.linear_reference",
    },
)
