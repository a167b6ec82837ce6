"""CPU implementation of the GPTQ inner loop; see gptq in src/ops.def."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import address

#: Maximum number of columns in a block.
LONGEST = 128


def supports(block: Tensor) -> bool:
    """Whether this implementation supports a block of columns [L, N]."""
    fits = block.device.type == "cpu" and block.dtype == torch.float32 and len(block) <= LONGEST
    return fits and block.stride(1) == 1 and library.unavailable() is None


def round_columns(
    block: Tensor,
    response: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor,
    codes: Tensor,
    groups: Sequence[int],
    places: Sequence[int],
    *,
    values: Tensor | None = None,
    steps: Sequence[float] = (),
) -> None:
    """Round the first M = len(groups) columns of ``block`` [L, N]; see gptq in src/ops.def.

    All tensors are float32 except ``codes`` (uint8), and rows are contiguous. scales, zeros and codes share one row
    stride, as do block and values.
    """
    rows, indices = torch.tensor(groups, dtype=torch.int32), torch.tensor(places, dtype=torch.int32)
    lengths = torch.tensor(steps, dtype=torch.float32)
    for alike in ((codes, scales, zeros), (block, values)):
        if len({t.stride(0) for t in alike if t is not None and len(t) > 1}) > 1:
            raise ValueError("rows of different distances")
    op = library.new_op("gptq")
    op.m = len(groups)
    op.n, op.length, op.bits = block.shape[1], len(block), bits
    op.stride, op.grid_stride, op.hinv_stride = block.stride(0), codes.stride(0), response.stride(0)
    op.block, op.hinv = address(block), address(response)
    op.values, op.steps, op.scales, op.zeros = address(values), address(lengths), address(scales), address(zeros)
    op.codes, op.groups, op.places = address(codes), address(rows), address(indices)
    library.OpList(op)()
