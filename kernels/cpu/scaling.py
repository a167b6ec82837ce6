"""CPU scaling, soft-capping and addition of activations. A row's result does not depend on the other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES
from aiakq.kernels.cpu.rows import threads_for
from aiakq.kernels.types import ScalingProblem


def prepare(scale: float, cap: float | None, factors: Tensor | None, problem: ScalingProblem) -> NativeScaling:
    """Prepare the scaling; factors [positions] float32, or None."""
    return NativeScaling(scale, cap, factors)


class NativeScaling:
    """softcap(scale * factor * x) + added; the interface is Scaling in ops/scaling.py."""

    def __init__(self, scale: float, cap: float | None, factors: Tensor | None) -> None:
        self.factors = None if factors is None else factors.float().contiguous()
        self.op = op = library.new_op("scaling")
        op.scale, op.cap = scale, cap or 0.0
        op.factors = library.address(self.factors)
        op.rows = 0 if self.factors is None else len(self.factors)
        self.ops = library.OpList(op)

    def __call__(
        self, x: Tensor, added: Tensor | None = None, *, positions: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x [M, D] and added [M, D] of the same dtype -> [M, D]."""
        op = self.op
        assert (positions is None) == (self.factors is None)
        if positions is not None and (positions.dtype != torch.int64 or len(positions) != len(x)):
            raise ValueError(f"{len(x)} rows with {len(positions)} positions in {positions.dtype}")
        y = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        for tensor in (x, y) if added is None else (x, y, added):
            if tensor.shape != x.shape or tensor.dim() != 2 or tensor.stride(1) != 1 or tensor.dtype != x.dtype:
                raise ValueError(f"rows {list(tensor.shape)} in {tensor.dtype} beside {list(x.shape)} in {x.dtype}")
        positions = None if positions is None else positions.contiguous()
        with self.ops.lock:
            op.m, op.d, op.type = x.shape[0], x.shape[1], TYPES[x.dtype]
            op.x, op.x_stride, op.y, op.y_stride = x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0)
            op.added, op.added_stride = (None, 0) if added is None else (added.data_ptr(), added.stride(0))
            op.positions = library.address(positions)
            self.ops(threads_for(x.numel()))
        return y
