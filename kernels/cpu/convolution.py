"""CPU causal convolution with a state. A token's result does not depend on how tokens are split into steps."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.attention import check_rows, step_tables
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.recurrent_types import ConvolutionProblem, ConvolutionSpec
from aiakq.kernels.types import AttentionContext

#: The same value as in src/ops.def.
MAX_TAPS = 16


def supports(problem: ConvolutionProblem) -> str | None:
    """Return None, or why not."""
    return f"it has at most {MAX_TAPS} taps" if problem.taps > MAX_TAPS else None


def prepare(spec: ConvolutionSpec, problem: ConvolutionProblem) -> NativeConvolution:
    """Prepare the convolution of one layer."""
    return NativeConvolution(spec)


class NativeConvolution:
    """The convolution of one layer; the interface is Convolution in ops/convolution.py."""

    def __init__(self, spec: ConvolutionSpec) -> None:
        self.weight = spec.weight.float().T.contiguous()
        self.bias = None if spec.bias is None else spec.bias.float().contiguous()
        self._state_shape = spec.state_shape
        self.op = op = library.new_op("convolution")
        op.taps, op.channels = self.weight.shape
        op.silu, op.weight, op.bias = spec.silu, library.address(self.weight), library.address(self.bias)
        self.ops = library.OpList(op)

    def __call__(
        self,
        x: Tensor,
        states: Tensor,
        context: AttentionContext,
        before: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """x, before and after [T, C] of one dtype -> [T, C]."""
        op, tables = self.op, step_tables(context)
        for tensor in (x, before, after):
            if tensor is not None:
                check_rows(tensor, op.channels)
                assert len(tensor) == len(x) and tensor.dtype == x.dtype, "rows that belong together"
        tables.check_states(states, self._state_shape, len(x))
        y = torch.empty(x.shape, dtype=x.dtype)
        with self.ops.lock:
            op.m, op.type, op.step, op.states = len(x), TYPES[x.dtype], tables.address, states.data_ptr()
            op.x, op.x_stride, op.y, op.y_stride = x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)
            op.before, op.before_stride = (None, 0) if before is None else (before.data_ptr(), before.stride(0))
            op.after, op.after_stride = (None, 0) if after is None else (after.data_ptr(), after.stride(0))
            self.ops()
        return y
