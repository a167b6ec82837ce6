"""GPTQ: columns of a block rounded one by one with compensation of the errors, a sweep over one, and range searches.

Matrices are transposed, [K, N]: a row is a column of the weight. The rows of a weight are independent of each other, so
a program takes a few of them and holds their part of the block in registers through all columns. Divisions are rounded
as IEEE 754 says, so that codes are those of torch unless a product that was fused with a sum puts a weight beyond the
middle between two.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: 1.5 * 2**23: added to and subtracted from a float32 of at most 2**22, it leaves the nearest integer, ties to even.
_INTEGERS = tl.constexpr(12582912.0)
#: Codes have at most 8 bits: what is further away than this is clamped anyway.
_FARTHEST = tl.constexpr(65536.0)


@triton.jit
def _rounded(x):
    """Return the nearest integers within +-_FARTHEST, ties to even."""
    return (tl.minimum(tl.maximum(x, -_FARTHEST), _FARTHEST) + _INTEGERS) - _INTEGERS


@triton.jit
def _codes(values, scales, zeros, TOP: tl.constexpr):
    """Return ``codes_for`` of aiakq.rounding.integers, as float32."""
    return tl.minimum(tl.maximum(_rounded(tl.div_rn(values, scales)) + zeros, 0.0), TOP)


@triton.jit
def _stored(scales, SIGNIFICANT: tl.constexpr):
    """Round float32 to float32 (24 bits), float16 (11) or bfloat16 (8), and convert it back."""
    if SIGNIFICANT == 11:
        return scales.to(tl.float16).to(tl.float32)
    elif SIGNIFICANT == 8:
        # By its bits, because the interpreter cuts off what a GPU rounds.
        word = scales.to(tl.int32, bitcast=True)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & -65536
        return word.to(tl.float32, bitcast=True)
    else:
        return scales


@triton.jit
def _scales(low, high, smallest, TOP: tl.constexpr, SYMMETRIC: tl.constexpr, SIGNIFICANT: tl.constexpr):
    """Return ``scales_for`` of aiakq.rounding.integers: scales and zero points of ranges."""
    exact = tl.div_rn(high - low, tl.full(low.shape, TOP, tl.float32))
    scales = tl.where(exact == 0, 1.0, tl.maximum(_stored(exact, SIGNIFICANT), smallest))
    if SYMMETRIC:
        zeros = tl.full(low.shape, (TOP + 1) // 2, tl.float32)
    else:
        zeros = tl.minimum(tl.maximum(_rounded(tl.div_rn(-low, scales)), 0.0), TOP)
    return scales, zeros


@triton.jit
def round_kernel(
    block_ptr,  # [L, N] float32
    response_ptr,  # [L, L] float32
    values_ptr,  # [L, N] float32
    steps_ptr,  # [M] float32
    scales_ptr,  # [K / G, N] float32
    zeros_ptr,  # [K / G, N] float32
    codes_ptr,  # [K, N] uint8
    places_ptr,  # [2, M] int32
    block_stride,
    response_stride,
    values_stride,
    scales_stride,
    zeros_stride,
    codes_stride,
    N,
    L,
    M,
    TOP: tl.constexpr,
    SWEEP: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round the first M columns of a block of L for BLOCK rows of the weight per program.

    ``round_columns`` of gptq.py, or with SWEEP ``move_columns``. Of ``places``, the first row holds the rows of scales,
    the second those of codes.
    """
    columns = tl.arange(0, LENGTH)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = rows < N
    inside = (columns < L)[:, None] & there[None, :]
    at = block_ptr + columns.to(tl.int64)[:, None] * block_stride + rows[None, :]
    tile = tl.load(at, mask=inside, other=0.0)
    for i in range(M):
        here = columns == i
        x = tl.sum(tl.where(here[:, None], tile, 0.0), axis=0)
        group = tl.load(places_ptr + i).to(tl.int64)
        place = tl.load(places_ptr + M + i).to(tl.int64)
        scale = tl.load(scales_ptr + group * scales_stride + rows, mask=there, other=1.0)
        zero = tl.load(zeros_ptr + group * zeros_stride + rows, mask=there, other=0.0)
        response = tl.load(response_ptr + i * response_stride + columns, mask=(columns > i) & (columns < L), other=0.0)
        if SWEEP:
            old = tl.load(values_ptr + i * values_stride + rows, mask=there, other=0.0)
            code = _codes(old + tl.load(steps_ptr + i) * x, scale, zero, TOP)
            new = (code - zero) * scale
            # All warps load the old values, and one of them stores the new ones.
            tl.debug_barrier()
            tl.store(values_ptr + i * values_stride + rows, new, mask=there)
            result = new - old
        else:
            code = _codes(x, scale, zero, TOP)
            pivot = tl.load(response_ptr + i * response_stride + i)
            result = tl.div_rn(x - (code - zero) * scale, tl.zeros_like(x) + pivot)
        tl.store(codes_ptr + place * codes_stride + rows, code.to(tl.uint8), mask=there)
        tile = tl.where(here[:, None], result[None, :], tile - response[:, None] * result[None, :])
    tl.store(at, tile, mask=inside)


@triton.jit
def _columns(first, columns, stride, there, G):
    """Load columns of a group of G; ``first`` [1, BLOCK] points to the first one."""
    inside = (columns < G)[:, None] & there[None, :]
    return tl.load(first + columns.to(tl.int64)[:, None] * stride, mask=inside, other=0.0)


@triton.jit
def search_kernel(
    groups_ptr,  # [N, K / G, G] float32
    cost_ptr,  # [K / G, G] float32
    fractions_ptr,  # [F] float32
    scales_ptr,  # [N, K / G] float32
    zeros_ptr,  # [N, K / G] float32
    row_stride,
    group_stride,
    column_stride,
    N,
    G,
    F,
    candidates,
    smallest,
    TOP: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    SIGNIFICANT: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Search the ranges of one group of BLOCK rows per program: ``search`` of gptq.py.

    ``candidates`` is F, or 2 F with negative scales.
    """
    group = tl.program_id(1)
    columns = tl.arange(0, LENGTH)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = rows < N
    first = groups_ptr + group.to(tl.int64) * group_stride + rows.to(tl.int64)[None, :] * row_stride
    cost_ptr += group.to(tl.int64) * G
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for start in range(0, G, LENGTH):
        tile = _columns(first, start + columns, column_stride, there, G)
        low = tl.minimum(low, tl.min(tile, axis=0))
        high = tl.maximum(high, tl.max(tile, axis=0))
    if SYMMETRIC:
        high = tl.maximum(-low, high)
        low = -high
    best, best_zero = _scales(low, high, smallest, TOP, SYMMETRIC, SIGNIFICANT)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    for candidate in range(candidates):
        fraction = tl.load(fractions_ptr + candidate % F)
        scale, zero = _scales(low * fraction, high * fraction, smallest, TOP, SYMMETRIC, SIGNIFICANT)
        scale = tl.where(candidate < F, scale, -scale)
        loss = tl.zeros([BLOCK], tl.float32)
        for start in range(0, G, LENGTH):
            tile = _columns(first, start + columns, column_stride, there, G)
            cost = tl.load(cost_ptr + start + columns, mask=start + columns < G, other=0.0)
            code = _codes(tile, scale[None, :], zero[None, :], TOP)
            gap = (code - zero[None, :]) * scale[None, :] - tile
            loss += tl.sum(gap * gap * cost[:, None], axis=0)
        better = loss < lowest
        best = tl.where(better, scale, best)
        best_zero = tl.where(better, zero, best_zero)
        lowest = tl.where(better, loss, lowest)
    out = rows.to(tl.int64) * tl.num_programs(1) + group
    tl.store(scales_ptr + out, best, mask=there)
    tl.store(zeros_ptr + out, best_zero, mask=there)
