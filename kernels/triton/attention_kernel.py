"""Attention over the paged cache: decoding, whose sequences are shared out in parts, and prompts or chunks of them.

Rows of a tile are the queries of one key-value head: tokens times the heads of its group, so keys are read once for
all of them. Positions go by in tiles that may hold several pages or a part of one. The softmax is the online one
(Milakov and Gimelshein 2018, arXiv:1805.02867) in powers of two; parts of a sequence are combined as in flash-
decoding.

Caches are [pages, P, Hkv, D] in float16, bfloat16, or 8 bits (int8, e4m3, e5m2) with scales [pages, P, Hkv] float32 per
token and head, which are taken into the scores and the weights, so that keys and values are only cast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.language import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(a, b):
    """a b in float32 of float16 or bfloat16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _as(stored, FLOAT: tl.constexpr):
    """What is stored as floats; the interpreter has no cast to bfloat16 but from float32."""
    if stored.dtype == FLOAT:
        return stored
    elif INTERPRETED:
        return stored.to(tl.float32).to(FLOAT)
    else:
        return stored.to(FLOAT)


@triton.jit
def attention_loop(
    q,  # [ROWS, D]
    own,  # [ROWS] the position of each row's token
    pages_ptr,  # of the sequence
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    head,
    begin,
    end,
    scale,
    HKV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    highest,
    total,
    sums,
):
    """The online softmax over positions ``begin`` to ``end``, going on from ``highest``, ``total`` and ``sums``.

    Without MASKED every row sees all of them, and they are whole tiles. ``scale`` includes log2(e).
    """
    d = tl.arange(0, WIDTH)
    inside = tl.arange(0, TILE)
    FLOAT: tl.constexpr = q.dtype
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        position = start + inside
        # What is beyond the end is the last one again, with no weight: to mask loads would cost more. Unsigned numbers
        # divide by a shift.
        at = (tl.minimum(position, end - 1) if MASKED else position).to(tl.uint32)
        page = tl.load(pages_ptr + at // PAGE).to(tl.int64)
        slot = (page * PAGE + at % PAGE) * HKV + head
        if D == WIDTH:
            k = tl.load(k_ptr + slot[None, :] * D + d[:, None])
            v = tl.load(v_ptr + slot[:, None] * D + d[None, :])
        else:
            k = tl.load(k_ptr + slot[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0.0)
            v = tl.load(v_ptr + slot[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        scores = product(q, _as(k, FLOAT)) * scale
        if SCALED:
            scores *= tl.load(k_scales_ptr + slot)[None, :]
        if MASKED:
            seen = (position[None, :] <= own[:, None]) & (position < end)[None, :]
            if WINDOW > 0:
                seen = seen & (position[None, :] > own[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet stays at minus infinity; 0 instead avoids inf - inf.
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        if SCALED:
            weights *= tl.load(v_scales_ptr + slot)[None, :]
        sums = sums * decay[:, None] + product(weights.to(FLOAT), _as(v, FLOAT))
        highest = now
    return highest, total, sums


@triton.jit
def decode_kernel(
    q_ptr,  # [S, H * D], rows q_stride apart
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,  # [S, most pages] int32
    lengths_ptr,  # [S] int32
    parts_ptr,  # [S, H, SPLIT, D] float32
    peaks_ptr,  # [S, H, SPLIT, 2] float32: the highest score and the sum
    q_stride,
    table_stride,
    scale,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One part of one sequence's positions for the heads of one group; parts that have nothing to do say so."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    first = tl.maximum(length - WINDOW, 0) // TILE if WINDOW > 0 else 0
    tiles = tl.cdiv(length, TILE) - first
    begin = (first + tiles * part // SPLIT) * TILE
    end = tl.minimum((first + tiles * (part + 1) // SPLIT) * TILE, length)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    there = (row < GROUP)[:, None] & (d < D)[None, :]
    at = (head * GROUP + row).to(tl.int64)
    q = tl.load(q_ptr + sequence * q_stride + at[:, None] * D + d[None, :], mask=there, other=0.0)
    own = tl.full((ROWS,), 0, tl.int32) + (length - 1)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    highest, total, sums = attention_loop(
        q, own, table_ptr + sequence * table_stride, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, head, begin, end,
        scale * LOG2E, HKV, D, WIDTH, PAGE, TILE, ROWS, WINDOW, SCALED, True, STAGES,
        highest, total, sums,
    )  # fmt: skip
    place = (sequence * (HKV * GROUP) + at) * SPLIT + part
    tl.store(parts_ptr + place[:, None] * D + d[None, :], sums, mask=there)
    tl.store(peaks_ptr + place * 2, highest, mask=row < GROUP)
    tl.store(peaks_ptr + place * 2 + 1, total, mask=row < GROUP)


@triton.jit
def combine_kernel(
    parts_ptr,
    peaks_ptr,
    out_ptr,  # [S, H * D]
    out_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two, at least SPLIT
):
    """The parts of decode_kernel made whole, for one head of one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    place = (sequence * H + head) * SPLIT + part
    there = part < SPLIT
    highest = tl.load(peaks_ptr + place * 2, mask=there, other=float("-inf"))
    total = tl.load(peaks_ptr + place * 2 + 1, mask=there, other=0.0)
    share = tl.exp2(highest - tl.max(highest, 0))
    # Parts that saw nothing hold zeros.
    sums = tl.load(
        parts_ptr + place[:, None] * D + d[None, :],
        mask=there[:, None] & (d < D)[None, :] & (total > 0)[:, None],
        other=0.0,
    )
    out = tl.sum(sums * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out_ptr + sequence * out_stride + head * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def prefill_kernel(
    q_ptr,  # [T, H * D], rows q_stride apart
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,  # [S, most pages] int32
    lengths_ptr,  # [S] int32
    starts_ptr,  # [S + 1] int32: where a sequence's tokens begin
    blocks_ptr,  # [blocks, 2] int32: sequence, first of its tokens
    out_ptr,  # [T, H * D]
    q_stride,
    out_stride,
    table_stride,
    scale,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, at least TOKENS * GROUP
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Up to TOKENS tokens of a sequence, all heads of one group, over the positions up to their own."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(blocks_ptr + 2 * block).to(tl.int64)
    offset = tl.load(blocks_ptr + 2 * block + 1)
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    length = tl.load(lengths_ptr + sequence)
    row = tl.arange(0, ROWS)
    token = offset + row // GROUP
    valid = (row < TOKENS * GROUP) & (token < count)
    own = length - count + tl.minimum(token, count - 1)
    last = length - count + tl.minimum(offset + TOKENS, count) - 1
    nearest = length - count + offset
    d = tl.arange(0, WIDTH)
    there = valid[:, None] & (d < D)[None, :]
    at = head * GROUP + row % GROUP
    line = (start + tl.minimum(token, count - 1)).to(tl.int64)
    q = tl.load(q_ptr + line[:, None] * q_stride + at[:, None] * D + d[None, :], mask=there, other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    # Every row sees what is before the block's first token, if its window reaches that far; the rest is masked.
    begin = tl.maximum(nearest - WINDOW + 1, 0) // TILE * TILE if WINDOW > 0 else 0
    edge = begin if WINDOW > 0 else (nearest + 1) // TILE * TILE
    factor = scale * LOG2E
    pages = table_ptr + sequence * table_stride
    highest, total, sums = attention_loop(
        q, own, pages, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, head, begin, edge, factor,
        HKV, D, WIDTH, PAGE, TILE, ROWS, WINDOW, SCALED, False, STAGES, highest, total, sums,
    )  # fmt: skip
    highest, total, sums = attention_loop(
        q, own, pages, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, head, edge, last + 1, factor,
        HKV, D, WIDTH, PAGE, TILE, ROWS, WINDOW, SCALED, True, STAGES, highest, total, sums,
    )  # fmt: skip
    out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + line[:, None] * out_stride + at[:, None] * D + d[None, :], out, mask=there)
