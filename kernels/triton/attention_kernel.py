"""Paged attention: split-KV decoding, and prefill of prompts or chunks of prompts.

Rows of a tile are the queries of one key-value head: tokens times the heads of its group, so keys are read once for
all of them. Tiles of positions may span several pages or part of one. The softmax is an online softmax
(Milakov and Gimelshein 2018, arXiv:1805.02867) in powers of two; splits of a sequence are combined as in
flash-decoding.

Caches are [pages, P, Hkv, D] in float16, bfloat16, or 8 bits (int8, e4m3, e5m2) with scales [pages, P, Hkv] float32 per
token and head, which are folded into the scores and the weights, so that keys and values are only cast.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.language import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(a, b):
    """a b of float16 or bfloat16, accumulated in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def as_float(stored, FLOAT: tl.constexpr):
    """Convert stored values to FLOAT; the interpreter can cast to bfloat16 only from float32."""
    if stored.dtype == FLOAT:
        return stored
    elif INTERPRETED:
        return stored.to(tl.float32).to(FLOAT)
    else:
        return stored.to(FLOAT)


@triton.jit
def _keys(k_ptr, slot, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load keys [WIDTH, TILE] of the slots [TILE]; zeros beyond D."""
    d = tl.arange(0, WIDTH)
    if D == WIDTH:
        return tl.load(k_ptr + slot[None, :] * D + d[:, None])
    else:
        return tl.load(k_ptr + slot[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0.0)


@triton.jit
def _values(v_ptr, slot, DV: tl.constexpr, WIDTH_V: tl.constexpr):
    """Load values [TILE, WIDTH_V] of the slots [TILE]; zeros beyond DV."""
    d = tl.arange(0, WIDTH_V)
    if DV == WIDTH_V:
        return tl.load(v_ptr + slot[:, None] * DV + d[None, :])
    else:
        return tl.load(v_ptr + slot[:, None] * DV + d[None, :], mask=(d < DV)[None, :], other=0.0)


@triton.jit
def no_positions(ROWS: tl.constexpr, WIDTH_V: tl.constexpr):
    """Return the initial ``highest``, ``total`` and ``sums`` of attention_loop."""
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    return highest, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDTH_V), tl.float32)


@triton.jit
def store_values(rows_ptr, values, valid, DV: tl.constexpr, WIDTH_V: tl.constexpr):
    """Store values [ROWS, WIDTH_V] at the addresses of the ``valid`` rows [ROWS]."""
    d = tl.arange(0, WIDTH_V)
    tl.store(rows_ptr[:, None] + d[None, :], values, mask=valid[:, None] & (d < DV)[None, :])


@triton.jit
def _first(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first position that a token at ``position`` attends to with a window or chunk."""
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else position * 0
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def attention_loop(
    q,  # [ROWS, D]
    row_pos,  # [ROWS] the position of each row's token
    pages_ptr,  # of the sequence
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
    slopes,  # [ROWS] of ALiBi, times log2(e)
    head, begin, end, scale, softcap,
    HKV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, WIDTH_V: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    ALIBI: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr,
    highest, total, sums,
):  # fmt: skip
    """Online softmax over positions ``begin`` to ``end``, continuing from ``highest``, ``total`` and ``sums``.

    Without MASKED, every row attends to all positions, which fill whole tiles. ``scale`` includes log2(e); if CAPPED,
    it is divided by the soft cap, and ``softcap`` includes log2(e).
    """
    inside = tl.arange(0, TILE)
    FLOAT: tl.constexpr = q.dtype
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        position = start + inside
        # Positions beyond the end load the last one again with weight 0, because masked loads would cost more. Unsigned
        # numbers are divided by a shift.
        at = (tl.minimum(position, end - 1) if MASKED else position).to(tl.uint32)
        page = tl.load(pages_ptr + at // PAGE).to(tl.int64)
        slot = (page * PAGE + at % PAGE) * HKV + head
        k, v = _keys(k_ptr, slot, D, WIDTH), _values(v_ptr, slot, DV, WIDTH_V)
        scores = product(q, as_float(k, FLOAT)) * scale
        if SCALED:
            scores *= tl.load(k_scales_ptr + slot)[None, :]
        if CAPPED:
            # tanh u = 1 - 2 / (1 + e^2u), whose exponential may be infinite.
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * LOG2E))))
        if ALIBI:
            scores -= slopes[:, None] * (row_pos[:, None] - position[None, :]).to(tl.float32)
        if MASKED:
            visible = (position[None, :] <= row_pos[:, None]) & (position < end)[None, :]
            if WINDOW > 0 or CHUNK > 0:
                visible = visible & (position[None, :] >= _first(row_pos, WINDOW, CHUNK)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        # A row without any visible position so far stays at minus infinity; 0 instead avoids inf - inf.
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        if SCALED:
            weights *= tl.load(v_scales_ptr + slot)[None, :]
        sums = sums * decay[:, None] + product(weights.to(FLOAT), as_float(v, FLOAT))
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
    parts_ptr,  # [S, H, SPLIT, DV] float32
    peaks_ptr,  # [S, H, SPLIT, 2] float32: the highest score and the sum
    slopes_ptr,  # [H] float32
    q_stride, table_stride, scale, softcap,
    HKV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    DV: tl.constexpr, WIDTH_V: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one sequence's positions for the heads of one group; empty splits are marked as such."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    first = _first(length - 1, WINDOW, CHUNK) // TILE if WINDOW > 0 or CHUNK > 0 else 0
    tiles = tl.cdiv(length, TILE) - first
    begin = (first + tiles * part // SPLIT) * TILE
    end = tl.minimum((first + tiles * (part + 1) // SPLIT) * TILE, length)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    mask = (row < GROUP)[:, None] & (d < D)[None, :]
    at = (head * GROUP + row).to(tl.int64)
    q = tl.load(q_ptr + sequence * q_stride + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    row_pos = tl.full((ROWS,), 0, tl.int32) + (length - 1)
    highest, total, sums = no_positions(ROWS, WIDTH_V)
    slopes = tl.load(slopes_ptr + at, mask=row < GROUP, other=0.0) * LOG2E if ALIBI else total
    highest, total, sums = attention_loop(
        q, row_pos, table_ptr + sequence * table_stride, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, slopes,
        head, begin, end,
        scale if CAPPED else scale * LOG2E, softcap * LOG2E, HKV, D, WIDTH, DV, WIDTH_V, PAGE, TILE, WINDOW, CHUNK,
        CAPPED, ALIBI, SCALED, True, STAGES, highest, total, sums,
    )  # fmt: skip
    index = (sequence * (HKV * GROUP) + at) * SPLIT + part
    store_values(parts_ptr + index * DV, sums, row < GROUP, DV, WIDTH_V)
    tl.store(peaks_ptr + index * 2, highest, mask=row < GROUP)
    tl.store(peaks_ptr + index * 2 + 1, total, mask=row < GROUP)


@triton.jit
def combine_kernel(
    parts_ptr,
    peaks_ptr,
    sinks_ptr,  # [H] float32
    out_ptr,  # [S, H * D]
    out_stride,
    H: tl.constexpr,
    D: tl.constexpr,  # of values
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two, at least SPLIT
    SINKS: tl.constexpr,
):
    """Combine the splits of decode_kernel for one head of one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDTH)
    index = (sequence * H + head) * SPLIT + part
    mask = part < SPLIT
    highest = tl.load(peaks_ptr + index * 2, mask=mask, other=float("-inf"))
    total = tl.load(peaks_ptr + index * 2 + 1, mask=mask, other=0.0)
    peak = tl.max(highest, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2E
        peak = tl.maximum(peak, sink)
    share = tl.exp2(highest - peak)
    whole = tl.sum(total * share, 0)
    if SINKS:
        whole += tl.exp2(sink - peak)
    # Empty splits hold zeros.
    sums = tl.load(
        parts_ptr + index[:, None] * D + d[None, :],
        mask=mask[:, None] & (d < D)[None, :] & (total > 0)[:, None],
        other=0.0,
    )
    out = tl.sum(sums * share[:, None], 0) / whole
    tl.store(out_ptr + sequence * out_stride + head * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def tokens_of(block, blocks_ptr, starts_ptr, lengths_ptr):
    """Return a block's sequence, its first token, the sequence's first row and number of tokens, and its length."""
    sequence = tl.load(blocks_ptr + 2 * block).to(tl.int64)
    offset = tl.load(blocks_ptr + 2 * block + 1)
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    return sequence, offset, start, count, tl.load(lengths_ptr + sequence)


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
    out_ptr,  # [T, H * DV]
    slopes_ptr,  # [H] float32
    sinks_ptr,  # [H] float32
    q_stride, out_stride, table_stride, scale, softcap,
    HKV: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, at least TOKENS * GROUP
    D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, WIDTH_V: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Up to TOKENS tokens of a sequence, all heads of one group, over the positions up to their own."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    sequence, offset, start, count, length = tokens_of(block, blocks_ptr, starts_ptr, lengths_ptr)
    row = tl.arange(0, ROWS)
    token = offset + row // GROUP
    valid = (row < TOKENS * GROUP) & (token < count)
    row_pos = length - count + tl.minimum(token, count - 1)
    last = length - count + tl.minimum(offset + TOKENS, count) - 1
    nearest = length - count + offset
    d = tl.arange(0, WIDTH)
    mask = valid[:, None] & (d < D)[None, :]
    at = head * GROUP + row % GROUP
    line = (start + tl.minimum(token, count - 1)).to(tl.int64)
    q = tl.load(q_ptr + line[:, None] * q_stride + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    highest, total, sums = no_positions(ROWS, WIDTH_V)
    if SINKS:
        # A sink acts as a first position with a score but no value.
        highest, total = tl.load(sinks_ptr + at) * LOG2E, total + 1.0
    slopes = tl.load(slopes_ptr + at) * LOG2E if ALIBI else total
    # All rows attend to positions before the block's first token, if their window reaches that far; the rest is masked.
    limited: tl.constexpr = WINDOW > 0 or CHUNK > 0
    begin = _first(nearest, WINDOW, CHUNK) // TILE * TILE if limited else 0
    edge = begin if limited else (nearest + 1) // TILE * TILE
    factor = scale if CAPPED else scale * LOG2E
    cap = softcap * LOG2E
    pages = table_ptr + sequence * table_stride
    highest, total, sums = attention_loop(
        q, row_pos, pages, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, slopes, head, begin, edge, factor, cap,
        HKV, D, WIDTH, DV, WIDTH_V, PAGE, TILE, WINDOW, CHUNK, CAPPED, ALIBI, SCALED, False, STAGES,
        highest, total, sums,
    )  # fmt: skip
    highest, total, sums = attention_loop(
        q, row_pos, pages, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, slopes, head, edge, last + 1, factor, cap,
        HKV, D, WIDTH, DV, WIDTH_V, PAGE, TILE, WINDOW, CHUNK, CAPPED, ALIBI, SCALED, True, STAGES,
        highest, total, sums,
    )  # fmt: skip
    out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
    store_values(out_ptr + line * out_stride + at * DV, out, valid, DV, WIDTH_V)
