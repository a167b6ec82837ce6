"""fp8a8 linear layers: e4m3 weights and e4m3 activations, multiplied by the tensor cores of GPUs from sm_89 on.

Weights have a scale per output or one per output and 128 inputs (blocks); activations one per row, per row and 128
inputs, or a stored one. As in linear_int8_kernel.py, few activations are the right operand and many the left one.

Tensor cores add products of 8-bit floats with 13 bits after the first (DeepSeek-V3, arXiv:2412.19437, section 3.5.2).
So every product begins at zero, covers at most 128 inputs, and is added in float32, times the scales of the
activations: Triton would make a mere sum the start of the next product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.language import sum_parts
from aiakq.kernels.triton.linear_int8_kernel import nearest

#: The largest e4m3 number.
LARGEST = tl.constexpr(448.0)


@triton.jit
def to_e4m3(x):
    """Round x float32 to the nearest e4m3, ties to even; beyond +-448 to these.

    Rounded here, because Triton converts by way of float16, cut off, on sm_89, and its interpreter inexactly: what e4m3
    has, both convert exactly.
    """
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 0xFF, 127 - 6)
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    inverse = ((257 - exponent) << 23).to(tl.float32, bitcast=True)
    return (nearest(x * inverse) * step).to(tl.float8e4nv)


@triton.jit
def scale_of(largest, bound, min_scale, POWERS: tl.constexpr):
    """Return the scales of groups whose max |x| is ``largest`` float32, as ``round_inputs`` in ops/block_floats.py."""
    scale = tl.maximum(tl.div_rn(tl.minimum(largest, bound), LARGEST), min_scale)
    if POWERS:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def write_e4m3(
    y, row, first, y_ptr, y_stride, scales_ptr, scales_stride, given_ptr, bound, min_scale,
    D: tl.constexpr, BLOCK: tl.constexpr, GIVEN: tl.constexpr, GROUP: tl.constexpr, POWERS: tl.constexpr,
):  # fmt: skip
    """Store BLOCK columns of a row y float32, which starts at ``first`` and is 0 beyond D, as e4m3, and the scale of
    each GROUP of them, at scales_ptr + group * scales_stride + row. GROUP 0: the whole row, of which y is all.
    """
    SIZE: tl.constexpr = GROUP if GROUP else BLOCK
    COUNT: tl.constexpr = BLOCK // SIZE
    groups = tl.reshape(y, (COUNT, SIZE))
    if GIVEN:
        scale = tl.load(given_ptr) + tl.zeros((COUNT,), tl.float32)
    else:
        scale = scale_of(tl.max(tl.abs(groups), 1), bound, min_scale, POWERS)
    codes = to_e4m3(tl.div_rn(groups, tl.broadcast_to(scale[:, None], (COUNT, SIZE))))
    group = tl.arange(0, COUNT)
    at = first + group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(y_ptr + row * y_stride + at, codes, mask=at < D)
    # Non-finite values have no code, so they make the scale non-finite.
    scale += tl.sum(groups * 0.0, 1)
    tl.store(scales_ptr + (first // SIZE + group) * scales_stride + row, scale, mask=first + group * SIZE < D)


# Do not recompile for every number of rows.
@triton.jit(do_not_specialize=["scales_stride"])
def quantize_e4m3_kernel(
    x_ptr,  # [M, K]
    codes_ptr,  # [M, K] e4m3
    scales_ptr,  # [groups, M] float32
    given_ptr,
    x_stride,
    scales_stride,
    bound,
    min_scale,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    GIVEN: tl.constexpr,
    GROUP: tl.constexpr,
    POWERS: tl.constexpr,
):
    """Quantize BLOCK columns of a row; with GROUP 0 the whole row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + at, mask=at < K, other=0.0).to(tl.float32)
    write_e4m3(
        x, row, first, codes_ptr, K, scales_ptr, scales_stride, given_ptr, bound, min_scale,
        K, BLOCK, GIVEN, GROUP, POWERS,
    )  # fmt: skip


@triton.jit
def _weight_scales(scales_ptr, n, first, step, N_PADDED: tl.constexpr, COMMON: tl.constexpr):
    """Load the scales of outputs ``n`` [BN] at a step; COMMON: the one of all of them, which starts at ``first``."""
    if COMMON:
        return tl.load(scales_ptr + step * N_PADDED + first)
    else:
        return tl.load(scales_ptr + step * N_PADDED + n)


@triton.jit
def fp8_weights_times_rows(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, n, first, row, rows, begin, end,
    K: tl.constexpr, N_PADDED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, X_GROUPS: tl.constexpr, W_GROUPS: tl.constexpr, COMMON: tl.constexpr,
):  # fmt: skip
    """W x^T over steps ``begin`` to ``end`` of BK inputs, float32 [BN, BM], of outputs ``n`` [BN] from ``first`` on,
    and rows ``row`` [BM] of ``rows``, with all scales but those per output.
    """
    k = tl.arange(0, BK)
    w_at = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x_ptr + row[None, :] * K + k[:, None]
    x_scale = tl.load(x_scales_ptr + row)
    acc = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        w = tl.load(w_at + step * BK, eviction_policy="evict_first")
        x = tl.load(x_at + step * BK)
        factor = x_scale
        if X_GROUPS:
            factor = tl.load(x_scales_ptr + tl.cast(step, tl.int64) * rows + row)
        product = tl.dot(w, x)
        if W_GROUPS:
            w_scale = _weight_scales(w_scales_ptr, n, first, step, N_PADDED, COMMON)
            if COMMON:
                factor *= w_scale
            else:
                product *= w_scale[:, None]
        acc += product * factor[None, :]
    return acc


@triton.jit
def fp8_rows_times_weights(
    x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, n, first, row, rows, begin, end,
    K: tl.constexpr, N_PADDED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, X_GROUPS: tl.constexpr, W_GROUPS: tl.constexpr, COMMON: tl.constexpr,
):  # fmt: skip
    """The same product as x W^T, float32 [BM, BN]."""
    k = tl.arange(0, BK)
    w_at = w_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    x_at = x_ptr + row[:, None] * K + k[None, :]
    x_scale = tl.load(x_scales_ptr + row)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        x = tl.load(x_at + step * BK)
        w = tl.load(w_at + step * BK)
        factor = x_scale
        if X_GROUPS:
            factor = tl.load(x_scales_ptr + tl.cast(step, tl.int64) * rows + row)
        product = tl.dot(x, w)
        if W_GROUPS:
            w_scale = _weight_scales(w_scales_ptr, n, first, step, N_PADDED, COMMON)
            if COMMON:
                factor *= w_scale
            else:
                product *= w_scale[None, :]
        acc += product * factor[:, None]
    return acc


# Do not recompile for every number of rows.
@triton.jit(do_not_specialize=["M"])
def fp8_kernel(
    x_ptr,  # [M, K] e4m3
    x_scales_ptr,  # [1, M] float32, or [K / BK, M] with X_GROUPS
    w_ptr,  # [N padded, K] e4m3
    w_scales_ptr,  # [1, N padded] float32, or [K / BK, N padded] with W_GROUPS
    bias_ptr,
    y_ptr,  # [M, N]
    parts_ptr,  # [SPLIT, M, N] float32
    counts_ptr,  # one per tile, 0 before and after
    y_stride,
    M,
    N,
    K: tl.constexpr, N_PADDED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, WEIGHTS_LEFT: tl.constexpr, BIAS: tl.constexpr, X_GROUPS: tl.constexpr,
    W_GROUPS: tl.constexpr,
    COMMON: tl.constexpr,  # whether all outputs of a tile have the same scales
):  # fmt: skip
    """A tile of BN outputs and BM rows, over one of SPLIT parts of the inputs."""
    STEPS: tl.constexpr = K // BK
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
    if WEIGHTS_LEFT:
        acc = fp8_weights_times_rows(
            x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, n, tile_n * BN, row, M, begin, end,
            K, N_PADDED, BN, BM, BK, STAGES, X_GROUPS, W_GROUPS, COMMON,
        )  # fmt: skip
        mask = (m < M)[None, :] & (n < N)[:, None]
        at = row[None, :] * N + n[:, None]
        out = row[None, :] * y_stride + n[:, None]
    else:
        acc = fp8_rows_times_weights(
            x_ptr, x_scales_ptr, w_ptr, w_scales_ptr, n, tile_n * BN, row, M, begin, end,
            K, N_PADDED, BN, BM, BK, STAGES, X_GROUPS, W_GROUPS, COMMON,
        )  # fmt: skip
        mask = (m < M)[:, None] & (n < N)[None, :]
        at = row[:, None] * N + n[None, :]
        out = row[:, None] * y_stride + n[None, :]
    if not W_GROUPS:
        scales = tl.load(w_scales_ptr + n)
        acc *= scales[:, None] if WEIGHTS_LEFT else scales[None, :]
    last = True
    if SPLIT > 1:
        acc, last = sum_parts(acc, parts_ptr, counts_ptr, at, mask, M, N, SPLIT)
    if last:
        if BIAS:
            bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
            acc += bias[:, None] if WEIGHTS_LEFT else bias[None, :]
        tl.store(y_ptr + out, acc.to(y_ptr.dtype.element_ty), mask=mask)
