"""CPU RMS norm and layer norm. A row's result does not depend on the other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.cpu.rows import as_rows, threads_for
from aiakq.kernels.types import ActivationLayout, NormProblem


def prepare(weight: Tensor, bias: Tensor | None, epsilon: float, problem: NormProblem) -> NativeNorm:
    """Prepare the norm; weight and bias [D] are kept as float32."""
    return NativeNorm(weight, bias, epsilon, centered=problem.kind == "layer")


class NativeNorm:
    """x / rms(x) * weight, or if ``centered`` (x - mean) / deviation * weight + bias, over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor | None, epsilon: float, centered: bool) -> None:
        self.weight = weight.float().contiguous()
        self.bias = None if bias is None else bias.float().contiguous()
        self.op = op = library.new_op("norm")
        op.d, op.centered, op.epsilon = weight.shape[0], centered, epsilon
        op.weight, op.bias = library.address(self.weight), library.address(self.bias)
        self.ops = library.OpList(op)

    def __call__(self, x: Tensor, residual: Tensor | None = None, layout: ActivationLayout | None = None) -> Tensor:
        """x [..., D] float32, float16 or bfloat16 -> the same; ``residual`` is first added to x in place."""
        op = self.op
        rows = as_rows(x)
        if residual is not None and rows.data_ptr() != x.data_ptr():  # rows is a copy, but the sum must be written to x
            return self(x.add_(residual))
        added = None if residual is None else as_rows(residual)
        y = torch.empty(rows.shape, dtype=rows.dtype)
        with self.ops.lock:
            op.residual, op.residual_stride = (None, 0) if added is None else (added.data_ptr(), added.stride(0))
            op.m, op.x_type = rows.shape[0], TYPES[x.dtype]
            op.x, op.x_stride, op.y, op.y_stride = rows.data_ptr(), rows.stride(0), y.data_ptr(), y.stride(0)
            self.ops(threads_for(rows.numel()))
        return y if x.dim() == 2 else y.view(x.shape)
