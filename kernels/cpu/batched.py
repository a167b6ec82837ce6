"""CPU batches of linear layers, with weights in their stored dtype; uses the same operation as dense.py.

A row's result does not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from aiakq.kernels.cpu import dense, library
from aiakq.kernels.cpu.library import TYPES, OpList, load_library
from aiakq.kernels.types import BatchedProblem

#: See ops/linear.py.
ROW_MULTIPLE = 1


def prepare(weight: Tensor, problem: BatchedProblem) -> NativeBatched:
    """Pack ``weight`` [B, N, K] (not modified) into tiles, padding N of each product to whole tiles."""
    batch, n, k = weight.shape
    padded = F.pad(weight, (0, 0, 0, -n % dense.TILE)).flatten(0, 1)
    return NativeBatched(padded, batch, n)


class NativeBatched:
    """y[:, b] = x[:, b] W[b]^T; the interface is BatchedLinear in ops/batched.py.

    weight  [B * N padded to 32, K].
    """

    def __init__(self, weight: Tensor, batch: int, n: int) -> None:
        self.op, self.tiles = dense.pack(weight)
        self.op.batch, self.op.n = batch, n
        self.ops, self.scratch_per_row = OpList(self.op), load_library().scratch_bytes(self.op)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [M, B, K] -> [M, B, N]; see BatchedLinear."""
        op, m = self.op, x.shape[0]
        y = torch.empty(m, op.batch, op.n, dtype=x.dtype) if out is None else out
        for each, width in ((x, op.k), (y, op.n)):
            if each.shape != (m, op.batch, width) or each.stride(2) != 1 or each.dtype != x.dtype:
                raise ValueError(f"{list(each.shape)} in {each.dtype} where [{m}, {op.batch}, {width}] is expected")
        scratch = library.allocate_scratch(m * self.scratch_per_row)
        with self.ops.lock:
            op.m, op.x_type, op.y_type = m, TYPES[x.dtype], TYPES[x.dtype]
            op.x, op.y, op.scratch = x.data_ptr(), y.data_ptr(), scratch.data_ptr()
            op.x_stride, op.x_batch_stride, _ = x.stride()
            op.y_stride, op.y_batch_stride, _ = y.stride()
            self.ops()
        return y
