"""Operations on rows of activations: norms with their residual, activation functions; as what follows wants them.

What follows in w8a8 is a product of integers: its activations are rounded here, where they are in registers, and
never written as floats. What follows in grouped.py wants sums of them, and has perhaps inputs in an order of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.linear_int8_kernel import SMALLEST, nearest
from aiakq.kernels.triton.linear_kernel import write_sums

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
GELU = tl.constexpr(2)
RELU = tl.constexpr(3)


@triton.jit
def _write(
    y, row, at, there, y_ptr, y_stride, scales_ptr, given_ptr, perm_ptr, sums_ptr, sums_stride, first,
    D: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr, GIVEN: tl.constexpr, PERM: tl.constexpr,
    SUMS: tl.constexpr, PER_PLANE: tl.constexpr, BITS: tl.constexpr, BKP: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row y float32, from ``first`` on: in y_ptr's dtype, perhaps with sums, or as int8 codes.

    PERM: in the order of perm_ptr, which takes the whole row.
    """
    if CODES:
        if GIVEN:
            scale = tl.load(given_ptr)
        else:
            scale = tl.maximum(tl.max(tl.where(there, tl.abs(y), 0.0), 0) / 127.0, SMALLEST)
        code = nearest(tl.minimum(tl.maximum(y / scale, -128.0), 127.0))
        tl.store(y_ptr + row * y_stride + at, code.to(tl.int8), mask=there)
        tl.store(scales_ptr + row, scale + tl.sum(tl.where(there, y * 0.0, 0.0), 0))
    else:
        y = y.to(y_ptr.dtype.element_ty)
        if PERM:
            # Through shared memory: reading x in another order would read every line of it many times.
            y = tl.gather(y, tl.load(perm_ptr + at, mask=there, other=0), 0)
        tl.store(y_ptr + row * y_stride + at, y, mask=there)
        if SUMS:
            BF16: tl.constexpr = y_ptr.dtype.element_ty == tl.bfloat16
            y = tl.where(there, y.to(tl.float32), 0.0)
            write_sums(y, first, row, sums_ptr, sums_stride, D, BLOCK, BITS, BKP, PER_PLANE, BF16)


@triton.jit
def norm_kernel(
    x_ptr,  # [M, D]; written if there is a residual
    residual_ptr,  # [M, D], added to x first
    weight_ptr,
    bias_ptr,
    y_ptr,  # [M, D] of x's dtype, or int8
    scales_ptr,  # [M] float32, with CODES
    given_ptr,
    x_stride,
    residual_stride,
    y_stride,
    epsilon,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CENTERED: tl.constexpr,
    BIAS: tl.constexpr,
    CODES: tl.constexpr,
    GIVEN: tl.constexpr,
    perm_ptr=None,  # of types.Arranging, like what follows
    sums_ptr=None,
    sums_stride=0,
    PERM: tl.constexpr = False,
    SUMS: tl.constexpr = False,
    PER_PLANE: tl.constexpr = False,
    BITS: tl.constexpr = 4,
    BKP: tl.constexpr = 32,
):
    """x / rms(x) * weight, or CENTERED: (x - mean) / deviation * weight + bias. One row per program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < D
    FLOAT: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + at, mask=there, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + at, mask=there, other=0.0).to(tl.float32)
        x = x.to(FLOAT)
        tl.store(x_ptr + row * x_stride + at, x, mask=there)
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=there, other=0.0).to(tl.float32)
    if CENTERED:
        x = tl.where(there, x - tl.sum(x, 0) / D, 0.0)
        y = x * tl.rsqrt(tl.sum(x * x, 0) / D + epsilon) * weight
        if BIAS:
            y += tl.load(bias_ptr + at, mask=there, other=0.0).to(tl.float32)
    else:
        # As models do it: the normalized row is rounded before it meets the weight.
        y = (x * tl.rsqrt(tl.sum(x * x, 0) / D + epsilon)).to(FLOAT).to(tl.float32) * weight
    _write(
        y, row, at, there, y_ptr, y_stride, scales_ptr, given_ptr, perm_ptr, sums_ptr, sums_stride, 0,
        D, BLOCK, CODES, GIVEN, PERM, SUMS, PER_PLANE, BITS, BKP,
    )  # fmt: skip


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == SILU:
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == GELU_TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    elif ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return tl.maximum(x, 0.0)


@triton.jit
def gate_kernel(
    gate_ptr,  # [M, D]
    up_ptr,  # [M, D]
    y_ptr,  # [M, D], or int8
    scales_ptr,
    given_ptr,
    gate_stride,
    up_stride,
    y_stride,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UP: tl.constexpr,
    CODES: tl.constexpr,
    GIVEN: tl.constexpr,
    sums_ptr=None,  # of types.Arranging
    sums_stride=0,
    SUMS: tl.constexpr = False,
    PER_PLANE: tl.constexpr = False,
    BITS: tl.constexpr = 4,
    BKP: tl.constexpr = 32,
):
    """act(gate) * up, or act(gate): BLOCK columns of a row per program; with CODES a whole row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    there = at < D
    y = _activated(tl.load(gate_ptr + row * gate_stride + at, mask=there, other=0.0).to(tl.float32), ACTIVATION)
    if UP:
        y *= tl.load(up_ptr + row * up_stride + at, mask=there, other=0.0).to(tl.float32)
    _write(
        y, row, at, there, y_ptr, y_stride, scales_ptr, given_ptr, None, sums_ptr, sums_stride, first,
        D, BLOCK, CODES, GIVEN, False, SUMS, PER_PLANE, BITS, BKP,
    )  # fmt: skip
