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
#: Splits that combine_kernel adds at once.
TOGETHER = tl.constexpr(8)


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
def _tiles_of(lengths_ptr, sequence, mask, TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the length of sequences, the first tile that their last tokens attend to, and the number of tiles, 0 where
    ``mask`` is not set; all uint32, because signed divisions take instructions that round negative numbers.
    """
    length = tl.load(lengths_ptr + sequence, mask=mask, other=1)
    first = _first(length - 1, WINDOW, CHUNK).to(tl.uint32) // TILE
    length = length.to(tl.uint32)
    return length, first, tl.where(mask, tl.cdiv(length, TILE) - first, 0)


@triton.jit(do_not_specialize=["S", "target"])
def split_kernel(
    lengths_ptr,  # [S] int32
    items_ptr,  # [items, 3] int32: sequence, first position, end
    starts_ptr,  # [S + 1] int32
    S,
    target,  # number of items
    TILE: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,  # of a sequence at most, a power of two
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The items of one sequence; see decode_splits. The last program stores their number.

    Every program counts the items of the sequences before its own, so that none waits for another.
    """
    sequence = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.uint32)
    longest = tl.zeros((BLOCK,), tl.uint32)
    for begin in range(0, S, BLOCK):
        _, _, tiles = _tiles_of(lengths_ptr, begin + at, begin + at < S, TILE, WINDOW, CHUNK)
        total += tiles
        longest = tl.maximum(longest, tiles)
    size = tl.maximum(tl.cdiv(tl.sum(total, 0), target.to(tl.uint32)), tl.cdiv(tl.max(longest, 0), SPLITS))
    items = tl.zeros((BLOCK,), tl.uint32)
    for begin in range(0, sequence, BLOCK):
        _, _, tiles = _tiles_of(lengths_ptr, begin + at, begin + at < sequence, TILE, WINDOW, CHUNK)
        items += tl.cdiv(tiles, size)
    start = tl.sum(items, 0).to(tl.int32)
    tl.store(starts_ptr + sequence, start)
    length, first, tiles = _tiles_of(lengths_ptr, sequence, sequence < S, TILE, WINDOW, CHUNK)
    count = tl.cdiv(tiles, size)
    part = tl.arange(0, SPLITS)
    item = items_ptr + (start + part) * 3
    part = part.to(tl.uint32)
    tl.store(item, tl.zeros((SPLITS,), tl.int32) + sequence, mask=part < count)
    tl.store(item + 1, (first + tiles * part // tl.maximum(count, 1)) * TILE, mask=part < count)
    end = tl.minimum((first + tiles * (part + 1) // tl.maximum(count, 1)) * TILE, length)
    tl.store(item + 2, end, mask=part < count)


@triton.jit
def positions_of(item, items_ptr):
    """Return an item's sequence, its first position, and its end."""
    found = items_ptr + item * 3
    return tl.load(found).to(tl.int64), tl.load(found + 1), tl.load(found + 2)


@triton.jit(do_not_specialize=["S"])
def decode_kernel(
    q_ptr,  # [S, H * D], rows q_stride apart
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,  # [S, most pages] int32
    lengths_ptr,  # [S] int32
    items_ptr,  # [items, 3] int32: sequence, first position, end
    starts_ptr,  # [S + 1] int32
    S,
    parts_ptr,  # [items, H, DV] float32
    peaks_ptr,  # [items, H, 2] float32: the highest score and the sum
    out_ptr,  # [S, H * DV]
    slopes_ptr,  # [H] float32
    sinks_ptr,  # [H] float32
    q_stride, out_stride, table_stride, scale, softcap,
    HKV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    DV: tl.constexpr, WIDTH_V: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one sequence's positions for the heads of one group; the result if it is the only one."""
    item = tl.program_id(0).to(tl.int64)
    if item >= tl.load(starts_ptr + S):
        return
    head = tl.program_id(1)
    sequence, begin, end = positions_of(item, items_ptr)
    length = tl.load(lengths_ptr + sequence)
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
    valid = row < GROUP
    if tl.load(starts_ptr + sequence + 1) - tl.load(starts_ptr + sequence) == 1:
        if SINKS:
            sink = tl.load(sinks_ptr + at, mask=valid, other=0.0) * LOG2E
            peak = tl.maximum(highest, sink)
            share = tl.exp2(highest - peak)
            total = total * share + tl.exp2(sink - peak)
            sums = sums * share[:, None]
        # Rows beyond GROUP have a sum as well, of scores of 0.
        out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
        store_values(out_ptr + sequence * out_stride + at * DV, out, valid, DV, WIDTH_V)
    else:
        index = item * (HKV * GROUP) + at
        store_values(parts_ptr + index * DV, sums, valid, DV, WIDTH_V)
        tl.store(peaks_ptr + index * 2, highest, mask=valid)
        tl.store(peaks_ptr + index * 2 + 1, total, mask=valid)


@triton.jit
def combine_kernel(
    parts_ptr,
    peaks_ptr,
    starts_ptr,  # [S + 1] int32: the items of each sequence
    sinks_ptr,  # [H] float32
    out_ptr,  # [S, H * D]
    out_stride,
    H: tl.constexpr,
    D: tl.constexpr,  # of values
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,  # of a sequence at most, a power of two
    SINKS: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """Combine the splits of decode_kernel for one head of one sequence; with SEVERAL, only those that are several."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - first
    if SEVERAL and count == 1:
        return
    part = tl.arange(0, SPLITS)
    index = (first + part).to(tl.int64) * H + head
    mask = part < count
    highest = tl.load(peaks_ptr + index * 2, mask=mask, other=float("-inf"))
    total = tl.load(peaks_ptr + index * 2 + 1, mask=mask, other=0.0)
    peak = tl.max(highest, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head) * LOG2E
        peak = tl.maximum(peak, sink)
    whole = tl.sum(total * tl.exp2(highest - peak), 0)
    if SINKS:
        whole += tl.exp2(sink - peak)
    d = tl.arange(0, WIDTH)
    sums = tl.zeros((WIDTH,), tl.float32)
    # Most sequences have few splits.
    for begin in range(0, count, TOGETHER):
        some = begin + tl.arange(0, TOGETHER)
        at = (first + some).to(tl.int64) * H + head
        share = tl.exp2(tl.load(peaks_ptr + at * 2, mask=some < count, other=float("-inf")) - peak)
        there = (some < count)[:, None] & (d < D)[None, :]
        parts = tl.load(parts_ptr + at[:, None] * D + d[None, :], mask=there, other=0.0)
        sums += tl.sum(parts * share[:, None], 0)
    out = sums / whole
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
