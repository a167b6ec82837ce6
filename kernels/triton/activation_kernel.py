"""Activation functions, plain and gated."""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.layouts_kernel import write_row

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
GELU = tl.constexpr(2)
RELU = tl.constexpr(3)
RELU2 = tl.constexpr(4)
QUICK_GELU = tl.constexpr(5)
SIGMOID = tl.constexpr(6)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == SILU:
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == GELU_TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    elif ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == RELU2:
        positive = tl.maximum(x, 0.0)
        return positive * positive
    elif ACTIVATION == QUICK_GELU:
        return x / (1.0 + tl.exp(-1.702 * x))
    elif ACTIVATION == SIGMOID:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return tl.maximum(x, 0.0)


# Do not recompile for every number of rows.
@triton.jit(do_not_specialize=["scales_stride"])
def gate_kernel(
    gate_ptr,  # [M, D]
    up_ptr,  # [M, D]
    y_ptr,  # [M, D], or int8 or e4m3
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
    sums_ptr=None,  # this and those until BKP: PackedLayout
    sums_stride=0,
    SUMS: tl.constexpr = False,
    PER_PLANE: tl.constexpr = False,
    BITS: tl.constexpr = 4,
    BKP: tl.constexpr = 32,
    scales_stride=0,  # this and the following: Float8Layout
    bound=0.0,
    min_scale=0.0,
    E4M3: tl.constexpr = False,
    GROUP: tl.constexpr = 0,
    POWERS: tl.constexpr = False,
):
    """act(gate) * up, or act(gate): BLOCK columns of a row per program; with CODES a whole row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    mask = at < D
    y = _activated(tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32), ACTIVATION)
    if UP:
        y *= tl.load(up_ptr + row * up_stride + at, mask=mask, other=0.0).to(tl.float32)
    write_row(
        y, row, at, mask, y_ptr, y_stride, scales_ptr, given_ptr, None, sums_ptr, sums_stride, first,
        D, BLOCK, CODES, GIVEN, False, SUMS, PER_PLANE, BITS, BKP, scales_stride, bound, min_scale,
        E4M3, GROUP, POWERS,
    )  # fmt: skip
