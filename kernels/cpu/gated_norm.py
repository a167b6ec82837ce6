"""CPU grouped RMS norm with a gate. A row's result does not depend on the other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.attention import check_rows
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.cpu.rows import threads_for
from aiakq.kernels.recurrent_types import GatedNormProblem


def prepare(weight: Tensor, epsilon: float, problem: GatedNormProblem) -> NativeGatedNorm:
    """Prepare the norm; weight [D] is kept as float32."""
    return NativeGatedNorm(weight, epsilon, problem)


class NativeGatedNorm:
    """Grouped RMS norm with a gate; the interface is GatedNorm in ops/gated_norm.py."""

    def __init__(self, weight: Tensor, epsilon: float, problem: GatedNormProblem) -> None:
        assert problem.size % problem.group == 0, "whole groups"
        self.weight = weight.float().contiguous()
        self.op = op = library.new_op("gated_norm")
        op.d, op.group, op.gate_first, op.epsilon = problem.size, problem.group, problem.gate_first, epsilon
        op.sigmoid = problem.sigmoid
        op.weight = library.address(self.weight)
        self.ops = library.OpList(op)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [M, D] and gate [M, D] of the same dtype -> [M, D]."""
        op = self.op
        check_rows(x, op.d)
        check_rows(gate, op.d)
        assert len(gate) == len(x) and gate.dtype == x.dtype, "rows that belong together"
        y = torch.empty(x.shape, dtype=x.dtype)
        with self.ops.lock:
            op.m, op.type = len(x), TYPES[x.dtype]
            op.x, op.x_stride, op.y, op.y_stride = x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)
            op.gate, op.gate_stride = gate.data_ptr(), gate.stride(0)
            self.ops(threads_for(x.numel()))
        return y
