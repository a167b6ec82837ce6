"""RMS norm and layer norm, with optional addition of a residual."""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.layouts_kernel import write_row


# Do not recompile for every number of rows.
@triton.jit(do_not_specialize=["scales_stride"])
def norm_kernel(
    x_ptr,  # [M, D]; written if there is a residual
    residual_ptr,  # [M, D], added to x first
    weight_ptr,
    bias_ptr,
    y_ptr,  # [M, D] of x's dtype, or int8 or e4m3
    scales_ptr,  # [M] float32, with CODES; [groups, M] with E4M3
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
    perm_ptr=None,  # this and those until BKP: PackedLayout
    sums_ptr=None,
    sums_stride=0,
    PERM: tl.constexpr = False,
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
    """x / rms(x) * weight, or CENTERED: (x - mean) / deviation * weight + bias. One row per program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < D
    FLOAT: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + at, mask=mask, other=0.0).to(tl.float32)
        x = x.to(FLOAT)
        tl.store(x_ptr + row * x_stride + at, x, mask=mask)
        x = x.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        x = tl.where(mask, x - tl.sum(x, 0) / D, 0.0)
        y = x * tl.rsqrt(tl.sum(x * x, 0) / D + epsilon) * weight
        if BIAS:
            y += tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        # As in the models: the normalized row is rounded before it is multiplied by the weight.
        y = (x * tl.rsqrt(tl.sum(x * x, 0) / D + epsilon)).to(FLOAT).to(tl.float32) * weight
    write_row(
        y, row, at, mask, y_ptr, y_stride, scales_ptr, given_ptr, perm_ptr, sums_ptr, sums_stride, 0,
        D, BLOCK, CODES, GIVEN, PERM, SUMS, PER_PLANE, BITS, BKP, scales_stride, bound, min_scale,
        E4M3, GROUP, POWERS,
    )  # fmt: skip
