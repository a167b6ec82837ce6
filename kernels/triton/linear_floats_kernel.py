"""y = x W^T for weights that are floats of 8 or 4 bits, activations in float16 or bfloat16 (fp8a16, MXFP4, NVFP4).

The layout is that of linear_kernel.py: words of 16 bits with a code in each plane. Codes become floats in registers
(float_codes.py), and as they have no zero point, products need no sums of activations. Scales are

- one per output, which is multiplied in at the end, together with ``factors``;
- float32 per group of inputs (SCALES 0): products of a group are summed alone, in float32, and then scaled, so that
  weights enter them without any rounding;
- of 8 bits per group, e8m0 (1) or e4m3 (2), in units of ``factors``. With many activations it is cheaper to scale
  weights first (SCALE_FIRST), and exact: a product of e2m1 with a power of two or e4m3 has at most six bits.

Several programs may share an output, each with a part of the inputs (split-K), see linear_kernel.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.float_codes import float_planes, inverse_of
from aiakq.kernels.triton.language import INTERPRETED, dot, sum_parts
from aiakq.kernels.triton.linear_kernel import beside, products


@triton.jit
def _group(step, PLANE: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BKP: tl.constexpr):
    """Return the group of a plane of a step."""
    BK: tl.constexpr = 16 // BITS * BKP
    if GROUP <= BK:
        return step * (BK // GROUP) + PLANE * BKP // GROUP
    else:
        return step * BK // GROUP


@triton.jit
def _stored_scales(scales_at, group, N_PADDED: tl.constexpr, SCALES: tl.constexpr):
    """Load what is stored of the scales of ``group``: of all four of its word, if there are any."""
    return tl.load(scales_at + (group if SCALES == 0 else group // 4) * N_PADDED)


@triton.jit
def _scale(stored, group, SCALES: tl.constexpr):
    """Return scales of ``group`` as float32."""
    if SCALES == 0:
        return stored
    else:
        code = (stored >> (group & 3) * 8) & 0xFF
        if SCALES == 1:
            return (code << 23).to(tl.float32, bitcast=True)
        else:
            return (code << 20).to(tl.float32, bitcast=True) * (2.0**120)


@triton.jit
def _scaled(plane, scale, SCALES: tl.constexpr):
    """Return a plane [BN, BKP] times scales of 8 bits [BN], exactly; in float16 times ``_room``."""
    FLOAT: tl.constexpr = plane.dtype
    scale = scale * _room(SCALES, FLOAT == tl.bfloat16)
    if INTERPRETED:
        return (plane.to(tl.float32) * scale[:, None]).to(FLOAT)
    else:
        return plane * scale.to(FLOAT)[:, None]


@triton.jit
def _room(SCALES: tl.constexpr, BF16: tl.constexpr):
    """Return the factor of scales in float16, which uses its range: those of e8m0 are at most 1, e4m3 at most 448."""
    if BF16:
        return 1.0
    return 2.0**15 if SCALES == 1 else 2.0**7


@triton.jit
def _groups_in_step(
    acc, planes, x_at, scales_at, step,
    N_PADDED: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, BKP: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, SCALES: tl.constexpr, SCALE_FIRST: tl.constexpr,
):  # fmt: skip
    """Accumulate the product of one step of several groups into ``acc``."""
    PLANES: tl.constexpr = 16 // BITS
    # Number of planes that share a scale.
    TOGETHER: tl.constexpr = GROUP // BKP
    if SCALES != 0:
        stored = _stored_scales(scales_at, _group(step, 0, GROUP, BITS, BKP), N_PADDED, SCALES)
    for plane in tl.static_range(PLANES):
        x = tl.load(x_at + plane * BKP, eviction_policy="evict_last")
        if plane % TOGETHER == 0:
            group = _group(step, plane, GROUP, BITS, BKP)
            if SCALES == 0:
                stored = _stored_scales(scales_at, group, N_PADDED, SCALES)
            scale = _scale(stored, group, SCALES)
            whole = tl.zeros((BN, BM), tl.float32)
        if SCALE_FIRST:
            acc = dot(_scaled(planes[plane], scale, SCALES), x, acc)
        else:
            whole = dot(planes[plane], x, whole)
            if plane % TOGETHER == TOGETHER - 1:
                acc += scale[:, None] * whole
    return acc


@triton.jit
def _scaled_beside(
    planes, stored, step, FIRST: tl.constexpr, COUNT: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, BKP: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Return COUNT planes from FIRST on side by side, [BN, COUNT BKP], times their scales; see ``_scaled``."""
    if COUNT == 1:
        # A plane never spans two groups, nor a step two words of scales.
        return _scaled(planes[FIRST], _scale(stored, _group(step, FIRST, GROUP, BITS, BKP), SCALES), SCALES)
    else:
        HALF: tl.constexpr = COUNT // 2
        return beside(
            _scaled_beside(planes, stored, step, FIRST, HALF, GROUP, BITS, BKP, SCALES),
            _scaled_beside(planes, stored, step, FIRST + HALF, HALF, GROUP, BITS, BKP, SCALES),
        )


@triton.jit
def floats_loop(
    x_at,  # [BKP, BM] of the first plane; with JOINED [step, BM]
    words_at,  # [BN, BKP] of the first step
    scales_at,  # [BN] of the first group
    begin,
    end,
    N_PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SCALES: tl.constexpr,
    BKP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    JOINED: tl.constexpr,
    HARDWARE: tl.constexpr,
    PLAIN: tl.constexpr,
    BF16: tl.constexpr,
):
    """W x^T over steps ``begin`` to ``end``, float32 [BN, BM], but for ``factors``; see float_codes_kernel."""
    BK: tl.constexpr = 16 // BITS * BKP
    # One group over all inputs: its scale is in ``factors``.
    WHOLE: tl.constexpr = GROUP == STEPS * BK
    acc = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        words = tl.load(words_at + step * (64 * BKP), eviction_policy="evict_first")
        planes = float_planes(words, BITS, MANTISSA, BF16, HARDWARE, PLAIN)
        if WHOLE:
            acc = products(acc, planes, x_at + step * BK, BITS, BKP, JOINED)
        elif JOINED and SCALE_FIRST:
            stored = _stored_scales(scales_at, _group(step, 0, GROUP, BITS, BKP), N_PADDED, SCALES)
            weights = _scaled_beside(planes, stored, step, 0, 16 // BITS, GROUP, BITS, BKP, SCALES)
            acc = dot(weights, tl.load(x_at + step * BK, eviction_policy="evict_last"), acc)
        elif GROUP < BK:
            acc = _groups_in_step(
                acc, planes, x_at + step * BK, scales_at, step, N_PADDED, GROUP, BITS, BKP, BN, BM, SCALES, SCALE_FIRST
            )  # fmt: skip
        else:
            group = _group(step, 0, GROUP, BITS, BKP)
            scale = _scale(_stored_scales(scales_at, group, N_PADDED, SCALES), group, SCALES)
            if SCALE_FIRST:
                for plane in tl.static_range(16 // BITS):
                    x = tl.load(x_at + step * BK + plane * BKP, eviction_policy="evict_last")
                    acc = dot(_scaled(planes[plane], scale, SCALES), x, acc)
            else:
                whole = products(tl.zeros((BN, BM), tl.float32), planes, x_at + step * BK, BITS, BKP, JOINED)
                acc += scale[:, None] * whole
    factor = inverse_of(BITS, MANTISSA, BF16, HARDWARE)
    if SCALE_FIRST:
        factor = factor / _room(SCALES, BF16)
    return acc * factor


# Do not recompile for every number of rows.
@triton.jit(do_not_specialize=["M"])
def float_codes_kernel(
    x_ptr,  # [M, K]
    words_ptr,  # [N / 64, STEPS, 64, BKP] int16
    scales_ptr,  # [groups, N] float32, or [groups / 4, N] int32; not with one group
    factors_ptr,  # [N] float32: factor of all scales of an output
    bias_ptr,
    y_ptr,  # [M, N]
    parts_ptr,  # [SPLIT, M, N] float32
    counts_ptr,  # one per tile, 0 before and after
    x_stride,
    y_stride,
    M,
    N,
    N_PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SCALES: tl.constexpr,
    BKP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    JOINED: tl.constexpr,
    HARDWARE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """W x^T for a tile of BN outputs and BM rows, over one of SPLIT parts of the inputs."""
    FLOAT: tl.constexpr = x_ptr.dtype.element_ty
    # Programs that read the same weights follow each other: the weights are read from memory once.
    tile_m = tl.program_id(0)
    tile_n = tl.program_id(1)
    part = tl.program_id(2)
    n = tile_n * BN + tl.arange(0, BN)
    m = tile_m * BM + tl.arange(0, BM)
    row = tl.where(m < M, m, 0).to(tl.int64)
    begin = part * STEPS // SPLIT
    end = (part + 1) * STEPS // SPLIT
    # See grouped_kernel in linear_kernel.py.
    tl.assume(begin < end)
    words_at = words_ptr + ((n // 64).to(tl.int64) * STEPS * 64 + n % 64)[:, None] * BKP + tl.arange(0, BKP)[None, :]
    TOGETHER: tl.constexpr = BKP * (16 // BITS) if JOINED else BKP
    x_at = x_ptr + row[None, :] * x_stride + tl.arange(0, TOGETHER)[:, None]
    acc = floats_loop(
        x_at, words_at, scales_ptr + n, begin, end, N_PADDED, STEPS, GROUP, BITS, MANTISSA, SCALES, BKP, BN, BM, STAGES,
        SCALE_FIRST, JOINED, HARDWARE, PLAIN, FLOAT == tl.bfloat16,
    )  # fmt: skip
    acc *= tl.load(factors_ptr + n)[:, None]
    mask = (m < M)[None, :] & (n < N)[:, None]
    last = True
    if SPLIT > 1:
        at = row[None, :] * N + n[:, None]
        acc, last = sum_parts(acc, parts_ptr, counts_ptr, at, mask, M, N, SPLIT)
    if last:
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + row[None, :] * y_stride + n[:, None], acc.to(FLOAT), mask=mask)


@triton.jit
def decode_codes_kernel(
    words_ptr,
    scales_ptr,
    factors_ptr,
    out_ptr,  # [N, K]
    N,
    N_PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SCALES: tl.constexpr,
    BKP: tl.constexpr,
    HARDWARE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Decode 64 outputs and one step of weights, for numbers of activations where a dense product is faster."""
    PLANES: tl.constexpr = 16 // BITS
    BK: tl.constexpr = PLANES * BKP
    K: tl.constexpr = STEPS * BK
    FLOAT: tl.constexpr = out_ptr.dtype.element_ty
    tile = tl.program_id(0)
    step = tl.program_id(1)
    n = tile * 64 + tl.arange(0, 64)
    inside = tl.arange(0, BKP)
    at = (tile.to(tl.int64) * STEPS + step) * (64 * BKP) + tl.arange(0, 64)[:, None] * BKP + inside[None, :]
    planes = float_planes(tl.load(words_ptr + at), BITS, MANTISSA, FLOAT == tl.bfloat16, HARDWARE, PLAIN)
    factors = tl.load(factors_ptr + n) * inverse_of(BITS, MANTISSA, FLOAT == tl.bfloat16, HARDWARE)
    for plane in tl.static_range(PLANES):
        scale = factors
        if GROUP < K:
            group = _group(step, plane, GROUP, BITS, BKP)
            scale *= _scale(_stored_scales(scales_ptr + n, group, N_PADDED, SCALES), group, SCALES)
        weights = (planes[plane].to(tl.float32) * scale[:, None]).to(FLOAT)
        out = n.to(tl.int64)[:, None] * K + step * BK + plane * BKP + inside[None, :]
        tl.store(out_ptr + out, weights, mask=(n < N)[:, None])
