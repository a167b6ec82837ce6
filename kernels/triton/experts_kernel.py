"""A mixture of experts without the host: pairs of tokens and experts sorted into blocks, and products over blocks.

A pair is a row of the selection [T, A] flattened. ``experts_count_kernel`` counts the pairs of each expert,
``experts_place_kernel`` writes the numbers of its pairs, in ascending order, into blocks of BM that belong to one
expert alone: the rest of the last block is padding, and blocks that no expert needs have none. How many blocks there
are follows from T alone, so that a CUDA graph can hold all of it.

A product takes the rows of a block from where they are, tokens or pairs, and stores a row per pair: nothing is moved.
Weights of all experts follow each other in the layouts of linear_kernel.py, linear_floats_kernel.py and
linear_int8_kernel.py, whose loops are used. Inputs are not divided among programs: a row does not depend on the rows
beside it, whatever their number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.language import dot
from aiakq.kernels.triton.linear_floats_kernel import floats_loop
from aiakq.kernels.triton.linear_fp8_kernel import fp8_rows_times_weights, fp8_weights_times_rows
from aiakq.kernels.triton.linear_int8_kernel import rows_times_weights, weights_times_rows
from aiakq.kernels.triton.linear_kernel import grouped_loop

#: Greater than every expert and pair.
_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["START", "PAIRS"])
def experts_count_kernel(
    selected_ptr,  # [PAIRS] int64
    counts_ptr,  # [experts] int32
    START,  # number of the first of these experts
    PAIRS,
    TILE: tl.constexpr,
):
    """Count the pairs of one expert."""
    expert = tl.program_id(0) + START
    at = tl.arange(0, TILE)
    found = tl.zeros((TILE,), tl.int32)
    for first in range(0, PAIRS, TILE):
        chosen = tl.load(selected_ptr + first + at, mask=first + at < PAIRS, other=-1)
        found += (chosen == expert).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(found, 0))


@triton.jit(do_not_specialize=["START", "PAIRS", "BLOCKS"])
def experts_place_kernel(
    selected_ptr,  # [PAIRS] int64
    counts_ptr,  # [COUNT] int32
    pairs_ptr,  # [BLOCKS, BM] int32; PAIRS where there is no pair
    experts_ptr,  # [BLOCKS] int32, -1 where there is none
    START,
    PAIRS,
    BLOCKS,
    COUNT: tl.constexpr,
    EXPERTS: tl.constexpr,  # COUNT or more, a power of two
    BM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the blocks of one expert, and a part of those of none."""
    own = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + number, mask=number < COUNT, other=0)
    blocks = (counts + BM - 1) // BM
    before = tl.sum(tl.where(number < own, blocks, 0), 0)
    own_blocks = tl.sum(tl.where(number == own, blocks, 0), 0)
    own_count = tl.sum(tl.where(number == own, counts, 0), 0)
    at = tl.arange(0, TILE)
    for first in range(0, own_blocks, TILE):
        tl.store(experts_ptr + before + first + at, own, mask=first + at < own_blocks)
    # All programs together: no more blocks than pairs are without an expert, nor more than experts if there are more
    # pairs than a program reads at once.
    unused = tl.sum(blocks, 0) + own * TILE + at
    tl.store(experts_ptr + unused, -1, mask=unused < BLOCKS)
    own_ptr = pairs_ptr + before * BM
    done = 0
    for first in range(0, PAIRS, TILE):
        pair = first + at
        found = (tl.load(selected_ptr + pair, mask=pair < PAIRS, other=-1) == own + START).to(tl.int32)
        place = done + tl.cumsum(found, 0) - found
        tl.store(own_ptr + place, pair, mask=found > 0)
        done += tl.sum(found, 0)
    padding = own_count + tl.arange(0, BM)
    tl.store(own_ptr + padding, PAIRS, mask=padding < own_blocks * BM)


@triton.jit
def _rows_of(pairs_ptr, block, PAIRS, SHARE: tl.constexpr, BM: tl.constexpr):
    """Return the pairs of a block [BM] int64, which of them there are, and the row of x of each, 0 without a pair."""
    pair = tl.load(pairs_ptr + block * BM + tl.arange(0, BM))
    there = pair < PAIRS
    return pair.to(tl.int64), there, tl.where(there, pair // SHARE, 0).to(tl.int64)


@triton.jit(do_not_specialize=["PAIRS"])
def experts_words_kernel(
    x_ptr,  # [PAIRS / SHARE, K]
    sums_ptr,  # of write_sums for rows of x; not with SCALE_FIRST
    pairs_ptr,  # [blocks, BM] int32
    experts_ptr,  # [blocks] int32
    words_ptr,  # [experts, N / 64, STEPS, 64, BKP] int16
    grid_ptr,  # [experts, groups, N] int32
    factors_ptr,  # [experts, N] float32
    bias_ptr,  # [experts, N unpadded]
    y_ptr,  # [PAIRS, N unpadded]
    x_stride,
    sums_stride,
    y_stride,
    PAIRS,
    N,
    SHARE: tl.constexpr,  # pairs of a row of x
    N_PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    BKP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    JOINED: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """W x^T for BN outputs and a block of pairs; see grouped_kernel in linear_kernel.py."""
    FLOAT: tl.constexpr = x_ptr.dtype.element_ty
    BK: tl.constexpr = 16 // BITS * BKP
    # Programs that read the same weights follow each other: the weights are read from memory once.
    block = tl.program_id(0)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    pair, there, row = _rows_of(pairs_ptr, block, PAIRS, SHARE, BM)
    own_words = words_ptr + expert * (N_PADDED * STEPS * BKP)
    words_at = own_words + ((n // 64).to(tl.int64) * STEPS * 64 + n % 64)[:, None] * BKP + tl.arange(0, BKP)[None, :]
    TOGETHER: tl.constexpr = BK if JOINED else BKP
    x_at = x_ptr + row[None, :] * x_stride + tl.arange(0, TOGETHER)[:, None]
    acc = grouped_loop(
        x_at, sums_ptr, words_at, grid_ptr + expert * (STEPS * BK // GROUP * N_PADDED), sums_stride, n, row, 0, STEPS,
        N_PADDED, STEPS, GROUP, BITS, BKP, BN, BM, STAGES, SCALE_FIRST, JOINED, PLAIN, FLOAT == tl.bfloat16,
    )  # fmt: skip
    acc *= tl.load(factors_ptr + expert * N_PADDED + n)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + pair[None, :] * y_stride + n[:, None], acc.to(FLOAT), mask=there[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["PAIRS"])
def experts_codes_kernel(
    x_ptr,  # [PAIRS / SHARE, K]
    pairs_ptr,  # [blocks, BM] int32
    experts_ptr,  # [blocks] int32
    words_ptr,  # [experts, N / 64, STEPS, 64, BKP] int16
    scales_ptr,  # [experts, GROUPS, N] float32 or int32, see float_codes_kernel
    factors_ptr,  # [experts, N] float32
    bias_ptr,  # [experts, N unpadded]
    y_ptr,  # [PAIRS, N unpadded]
    x_stride,
    y_stride,
    PAIRS,
    N,
    SHARE: tl.constexpr,  # pairs of a row of x
    N_PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    SCALES: tl.constexpr,
    BKP: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    JOINED: tl.constexpr,
    HARDWARE: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """W x^T for BN outputs and a block of pairs; see float_codes_kernel in linear_floats_kernel.py."""
    FLOAT: tl.constexpr = x_ptr.dtype.element_ty
    block = tl.program_id(0)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    pair, there, row = _rows_of(pairs_ptr, block, PAIRS, SHARE, BM)
    own_words = words_ptr + expert * (N_PADDED * STEPS * BKP)
    words_at = own_words + ((n // 64).to(tl.int64) * STEPS * 64 + n % 64)[:, None] * BKP + tl.arange(0, BKP)[None, :]
    TOGETHER: tl.constexpr = 16 // BITS * BKP if JOINED else BKP
    x_at = x_ptr + row[None, :] * x_stride + tl.arange(0, TOGETHER)[:, None]
    acc = floats_loop(
        x_at, words_at, scales_ptr + expert * (GROUPS * N_PADDED) + n, 0, STEPS, N_PADDED, STEPS, GROUP, BITS, MANTISSA,
        SCALES, BKP, BN, BM, STAGES, SCALE_FIRST, JOINED, HARDWARE, PLAIN, FLOAT == tl.bfloat16,
    )  # fmt: skip
    acc *= tl.load(factors_ptr + expert * N_PADDED + n)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(y_ptr + pair[None, :] * y_stride + n[:, None], acc.to(FLOAT), mask=there[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["PAIRS", "STEPS"])
def experts_floats_kernel(
    x_ptr,  # [PAIRS / SHARE, K]
    pairs_ptr,  # [blocks, BM] int32
    experts_ptr,  # [blocks] int32
    w_ptr,  # [experts, N, K]
    bias_ptr,  # [experts, N]
    y_ptr,  # [PAIRS, N]
    x_stride,
    y_stride,
    PAIRS,
    N,
    STEPS,  # K / BK; if it were a constant, short loops would be unrolled and their products serialized
    SHARE: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
):
    """W x^T for BN outputs and a block of pairs, with weights of the dtype of the activations."""
    block = tl.program_id(0)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    pair, there, row = _rows_of(pairs_ptr, block, PAIRS, SHARE, BM)
    k = tl.arange(0, BK)
    w_at = w_ptr + (expert * N + tl.where(n < N, n, 0))[:, None] * K + k[None, :]
    x_at = x_ptr + row[None, :] * x_stride + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    # See grouped_kernel in linear_kernel.py.
    tl.assume(STEPS > 0)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        w = tl.load(w_at + step * BK, eviction_policy="evict_first")
        acc = dot(w, tl.load(x_at + step * BK), acc)
    if BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = y_ptr + pair[None, :] * y_stride + n[:, None]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=there[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["PAIRS", "STEPS"])
def experts_integers_kernel(
    x_ptr,  # [PAIRS / SHARE, K] int8
    x_scales_ptr,  # [PAIRS / SHARE] float32
    pairs_ptr,  # [blocks, BM] int32
    experts_ptr,  # [blocks] int32
    w_ptr,  # [experts, N_PADDED, K] int8
    w_scales_ptr,  # [experts, N_PADDED] float32
    bias_ptr,  # [experts, N]
    y_ptr,  # [PAIRS, N]
    y_stride,
    PAIRS,
    N,
    STEPS,  # K / BK, as in experts_floats_kernel
    SHARE: tl.constexpr,
    N_PADDED: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The integer product of BN outputs and a block of pairs; see integers_kernel in linear_int8_kernel.py."""
    block = tl.program_id(0)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    pair, there, row = _rows_of(pairs_ptr, block, PAIRS, SHARE, BM)
    own_ptr = w_ptr + expert * (N_PADDED * K)
    tl.assume(STEPS > 0)
    if WEIGHTS_LEFT:
        acc = weights_times_rows(x_ptr, own_ptr, n, row, 0, STEPS, K, BN, BM, BK, STAGES)
    else:
        acc = tl.trans(rows_times_weights(x_ptr, own_ptr, n, row, 0, STEPS, K, BN, BM, BK, STAGES))
    scales = tl.load(w_scales_ptr + expert * N_PADDED + n)
    value = acc.to(tl.float32) * tl.load(x_scales_ptr + row)[None, :] * scales[:, None]
    if BIAS:
        value += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = y_ptr + pair[None, :] * y_stride + n[:, None]
    tl.store(out, value.to(y_ptr.dtype.element_ty), mask=there[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["PAIRS", "ROWS", "STEPS"])
def experts_fp8_kernel(
    x_ptr,  # [ROWS, K] e4m3
    x_scales_ptr,  # [1 or K / BK, ROWS] float32
    pairs_ptr,  # [blocks, BM] int32
    experts_ptr,  # [blocks] int32
    w_ptr,  # [experts, N_PADDED, K] e4m3
    w_scales_ptr,  # [experts, GROUPS, N_PADDED] float32
    bias_ptr,  # [experts, N]
    y_ptr,  # [PAIRS, N]
    y_stride,
    PAIRS,
    ROWS,  # PAIRS / SHARE
    N,
    STEPS,  # K / BK, as in experts_floats_kernel
    SHARE: tl.constexpr,
    K: tl.constexpr,
    N_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    WEIGHTS_LEFT: tl.constexpr,
    BIAS: tl.constexpr,
    X_GROUPS: tl.constexpr,
    W_GROUPS: tl.constexpr,
    COMMON: tl.constexpr,
):
    """The e4m3 product of BN outputs and a block of pairs; see fp8_kernel in linear_fp8_kernel.py."""
    block = tl.program_id(0)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    first = tl.program_id(1) * BN
    n = first + tl.arange(0, BN)
    pair, there, row = _rows_of(pairs_ptr, block, PAIRS, SHARE, BM)
    own_ptr, scales_ptr = w_ptr + expert * (N_PADDED * K), w_scales_ptr + expert * (GROUPS * N_PADDED)
    tl.assume(STEPS > 0)
    if WEIGHTS_LEFT:
        acc = fp8_weights_times_rows(
            x_ptr, x_scales_ptr, own_ptr, scales_ptr, n, first, row, ROWS, 0, STEPS,
            K, N_PADDED, BN, BM, BK, STAGES, X_GROUPS, W_GROUPS, COMMON,
        )  # fmt: skip
    else:
        acc = tl.trans(fp8_rows_times_weights(
            x_ptr, x_scales_ptr, own_ptr, scales_ptr, n, first, row, ROWS, 0, STEPS,
            K, N_PADDED, BN, BM, BK, STAGES, X_GROUPS, W_GROUPS, COMMON,
        ))  # fmt: skip
    if not W_GROUPS:
        acc *= tl.load(scales_ptr + n)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = y_ptr + pair[None, :] * y_stride + n[:, None]
    tl.store(out, acc.to(y_ptr.dtype.element_ty), mask=there[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["START", "END"])
def experts_sum_kernel(
    y_ptr,  # [T * TOP, N]
    selected_ptr,  # [T, TOP] int64
    weights_ptr,  # [T, TOP] float32
    out_ptr,  # [T, N] float32
    N,
    START,
    END,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP or more, a power of two
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum BLOCK outputs of a token's experts from START to END - 1, in ascending order of experts."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    chosen = tl.load(selected_ptr + token * TOP + slot, mask=slot < TOP, other=0)
    keys = tl.where(slot < TOP, chosen.to(tl.int32) * SLOTS + slot, _NONE)
    key = -1
    acc = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.static_range(TOP):
        key = tl.min(tl.where(keys > key, keys, _NONE), 0)
        expert = key // SLOTS
        pair = token * TOP + key % SLOTS
        own = (n < N) & (expert >= START) & (expert < END)
        y = tl.load(y_ptr + pair * N + n, mask=own, other=0.0).to(tl.float32)
        acc += y * tl.load(weights_ptr + pair) if WEIGHTED else y
    tl.store(out_ptr + token * N + n, acc, mask=n < N)
