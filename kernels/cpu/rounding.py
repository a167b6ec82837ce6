"""Rounds weights to 8 bits on the CPU, in one pass over each row."""

from __future__ import annotations

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.cpu.library import TYPES


def supports(weight: Tensor) -> bool:
    """Whether this implementation rounds ``weight`` [N, K]."""
    floats = weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return weight.device.type == "cpu" and floats and library.unavailable() is None


def round_rows(weight: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """Return codes [N, K] uint8 and scales [N] float32 of ``weight`` [N, K], symmetric around 128.

    Scales hold numbers of the weight's dtype, none below ``smallest``; that of a row of zeros is 1, and that of a row
    with a value that is not finite NaN. See rounding in src/ops.def.
    """
    weight = weight.contiguous()
    codes, scales = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(len(weight))
    op = library.new_op("rounding")
    op.m, op.k = weight.shape
    op.x_type = op.storage = TYPES[weight.dtype]
    op.smallest = smallest
    op.x, op.codes, op.scales = weight.data_ptr(), codes.data_ptr(), scales.data_ptr()
    library.OpList(op)()
    return codes, scales
