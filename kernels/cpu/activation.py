"""CPU activation functions. A row's result does not depend on the other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.cpu.rows import as_rows, threads_for
from aiakq.kernels.types import ActivationLayout, ActivationProblem

#: Names of ActivationFunction, in the order of src/ops.def.
FUNCTIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "quick_gelu", "sigmoid", "clamped_swiglu")


def prepare(problem: ActivationProblem) -> NativeActivation:
    """Return the function that ``problem`` names."""
    return NativeActivation(problem.function)


class NativeActivation:
    """Native activation function: act(x), or act(gate) * up."""

    def __init__(self, function: str) -> None:
        self.op = op = library.new_op("activation")
        op.function = FUNCTIONS.index(function)
        self.ops = library.OpList(op)

    def __call__(self, x: Tensor, layout: ActivationLayout | None = None) -> Tensor:
        """x [..., I] float32, float16 or bfloat16 -> the same shape and dtype."""
        rows = as_rows(x)
        y = self._run(rows, rows.shape[1], None, 0)
        return y if x.dim() == 2 else y.view(x.shape)

    def gated(self, x: Tensor, layout: ActivationLayout | None = None) -> Tensor:
        """Return act(first half of the columns) * second half: x [M, 2 I] -> [M, I]."""
        rows = as_rows(x)
        columns = rows.shape[1] // 2
        return self._run(rows, columns, rows.data_ptr() + columns * rows.element_size(), rows.stride(0))

    def _run(self, gate: Tensor, columns: int, up: int | None, up_stride: int) -> Tensor:
        op = self.op
        m = gate.shape[0]
        y = torch.empty(m, columns, dtype=gate.dtype)
        with self.ops.lock:
            op.up, op.up_stride = up, up_stride
            op.m, op.columns, op.type = m, columns, TYPES[gate.dtype]
            op.gate, op.gate_stride, op.y, op.y_stride = gate.data_ptr(), gate.stride(0), y.data_ptr(), columns
            self.ops(threads_for(m * columns))
        return y
