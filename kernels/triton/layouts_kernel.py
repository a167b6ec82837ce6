"""Stores a computed row in the activation layout of the next linear layer; see layouts.py.

The input of a w8a8 or fp8a8 layer is quantized here while it is in registers and never written as floats. Weights with
groups (linear_kernel.py) need sums of their input, and possibly its columns in another order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.linear_fp8_kernel import write_e4m3
from aiakq.kernels.triton.linear_int8_kernel import SMALLEST, nearest
from aiakq.kernels.triton.linear_kernel import write_sums


@triton.jit
def write_row(
    y, row, at, mask, y_ptr, y_stride, scales_ptr, given_ptr, perm_ptr, sums_ptr, sums_stride, first,
    D: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr, GIVEN: tl.constexpr, PERM: tl.constexpr,
    SUMS: tl.constexpr, PER_PLANE: tl.constexpr, BITS: tl.constexpr, BKP: tl.constexpr,
    scales_stride, bound, min_scale, E4M3: tl.constexpr, GROUP: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """Store BLOCK columns of a row y float32, starting at ``first``: in y_ptr's dtype, optionally with sums, or as
    int8 or, E4M3, as ``write_e4m3`` does.

    PERM: permuted by perm_ptr, which requires the whole row.
    """
    if E4M3:
        write_e4m3(
            tl.where(mask, y, 0.0), row, first, y_ptr, y_stride, scales_ptr, scales_stride, given_ptr, bound, min_scale,
            D, BLOCK, GIVEN, GROUP, POWERS,
        )  # fmt: skip
    elif CODES:
        if GIVEN:
            scale = tl.load(given_ptr)
        else:
            scale = tl.maximum(tl.max(tl.where(mask, tl.abs(y), 0.0), 0) / 127.0, SMALLEST)
        code = nearest(tl.minimum(tl.maximum(y / scale, -128.0), 127.0))
        tl.store(y_ptr + row * y_stride + at, code.to(tl.int8), mask=mask)
        tl.store(scales_ptr + row, scale + tl.sum(tl.where(mask, y * 0.0, 0.0), 0))
    else:
        y = y.to(y_ptr.dtype.element_ty)
        if PERM:
            # Permute in shared memory: reading x in another order would load each cache line many times.
            y = tl.gather(y, tl.load(perm_ptr + at, mask=mask, other=0), 0)
        tl.store(y_ptr + row * y_stride + at, y, mask=mask)
        if SUMS:
            BF16: tl.constexpr = y_ptr.dtype.element_ty == tl.bfloat16
            y = tl.where(mask, y.to(tl.float32), 0.0)
            write_sums(y, first, row, sums_ptr, sums_stride, D, BLOCK, BITS, BKP, PER_PLANE, BF16)
