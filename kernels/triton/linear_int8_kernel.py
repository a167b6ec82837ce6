"""w8a8 linear layers: activations quantized per token or with a static scale, integer dot products.

With few activations the product is W x^T, with many x W^T: the larger operand is the left one, of which a tensor core
takes 64 rows at a time. Partial sums of split-K are integers, so their sum is exact in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.language import sum_parts

#: The smallest normal float32; Triton would treat a smaller constant as float64 and continue in float64.
SMALLEST = tl.constexpr(2.0**-126)


@triton.jit
def nearest(x):
    """Round x to integers, ties to even, for |x| < 2^22."""
    return (x.to(tl.float32) + 12582912.0) - 12582912.0


@triton.jit
def quantize_kernel(
    x_ptr, codes_ptr, scales_ptr, given_ptr, x_stride, K: tl.constexpr, BLOCK: tl.constexpr, GIVEN: tl.constexpr
):  # fmt: skip
    """Quantize a row of x [M, K] to codes [M, K] int8 and a scale [M] float32: max |x| / 127, or ``given``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + at, mask=at < K, other=0.0).to(tl.float32)
    if GIVEN:
        scale = tl.load(given_ptr)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), 0) / 127.0, SMALLEST)
    code = nearest(tl.minimum(tl.maximum(x / scale, -128.0), 127.0))
    tl.store(codes_ptr + row * K + at, code.to(tl.int8), mask=at < K)
    # Non-finite values have no code, so they make the row's scale non-finite.
    tl.store(scales_ptr + row, scale + tl.sum(x * 0.0, 0))


@triton.jit
def weights_times_rows(
    x_ptr, w_ptr, n, row, begin, end,
    K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """W x^T over steps ``begin`` to ``end`` of BK inputs, int32 [BN, BM], of outputs ``n`` [BN], rows ``row`` [BM]."""
    k = tl.arange(0, BK)
    w_at = w_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    x_at = x_ptr + row[None, :] * K + k[:, None]
    acc = tl.zeros((BN, BM), tl.int32)
    for step in tl.range(begin, end, num_stages=STAGES):
        w = tl.load(w_at + step * BK, eviction_policy="evict_first")
        acc = tl.dot(w, tl.load(x_at + step * BK), acc, out_dtype=tl.int32)
    return acc


@triton.jit
def rows_times_weights(
    x_ptr, w_ptr, n, row, begin, end,
    K: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same product as x W^T, int32 [BM, BN]."""
    k = tl.arange(0, BK)
    w_at = w_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    x_at = x_ptr + row[:, None] * K + k[None, :]
    acc = tl.zeros((BM, BN), tl.int32)
    for step in tl.range(begin, end, num_stages=STAGES):
        acc = tl.dot(tl.load(x_at + step * BK), tl.load(w_at + step * BK), acc, out_dtype=tl.int32)
    return acc


# Do not recompile for every number of rows.
@triton.jit(do_not_specialize=["M"])
def integers_kernel(
    x_ptr,  # [M, K] int8
    x_scales_ptr,  # [M] float32
    w_ptr,  # [N padded, K] int8
    w_scales_ptr,  # [N padded] float32
    bias_ptr,
    y_ptr,  # [M, N]
    parts_ptr,  # [SPLIT, M, N] int32
    counts_ptr,  # one per tile, 0 before and after
    y_stride,
    M,
    N,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    BIAS: tl.constexpr,
):
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
    if WEIGHTS_LEFT:
        acc = weights_times_rows(x_ptr, w_ptr, n, row, begin, end, K, BN, BM, BK, STAGES)
    else:
        acc = rows_times_weights(x_ptr, w_ptr, n, row, begin, end, K, BN, BM, BK, STAGES)
    scales = tl.load(w_scales_ptr + n)
    x_scales = tl.load(x_scales_ptr + row)
    if WEIGHTS_LEFT:
        mask = (m < M)[None, :] & (n < N)[:, None]
        at = row[None, :] * N + n[:, None]
        out = row[None, :] * y_stride + n[:, None]
    else:
        mask = (m < M)[:, None] & (n < N)[None, :]
        at = row[:, None] * N + n[None, :]
        out = row[:, None] * y_stride + n[None, :]
    last = True
    if SPLIT > 1:
        acc, last = sum_parts(acc, parts_ptr, counts_ptr, at, mask, M, N, SPLIT)
    if last:
        if WEIGHTS_LEFT:
            value = acc.to(tl.float32) * x_scales[None, :] * scales[:, None]
        else:
            value = acc.to(tl.float32) * x_scales[:, None] * scales[None, :]
        if BIAS:
            bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
            value += bias[:, None] if WEIGHTS_LEFT else bias[None, :]
        tl.store(y_ptr + out, value.to(y_ptr.dtype.element_ty), mask=mask)
