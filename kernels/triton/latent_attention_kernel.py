"""Attention over a paged cache of latents (MLA; DeepSeek-V2 2024, arXiv:2405.04434), for decoding and prefill.

All heads share one key per position: R rotated elements followed by the latent of L elements, which is also the value.
Rows of a tile are heads of a few adjacent tokens. A tile of latents is multiplied twice: with the latent part of the
queries, to which the product of the rotated parts is added, and with the softmax weights. Thus neither part is padded
to a power of two that holds both.

Caches are [pages, P, 1, R + L] in the dtypes of attention_kernel.py; the softmax and the splits of sequences are also
those of attention_kernel.py. 16-bit latents are loaded once. Triton prefetches 8-bit latents only if a load has a
single use, so they are loaded twice, the second time from the GPU's cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.attention_kernel import (
    as_float,
    no_positions,
    positions_of,
    product,
    store_values,
    tokens_of,
)


@triton.jit
def _columns(rows_ptr, first, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Load elements ``first`` to ``first + SIZE`` of the rows at ``rows_ptr`` [TILE]: [TILE, WIDTH], zero-padded."""
    d = tl.arange(0, WIDTH)
    if SIZE == WIDTH:
        return tl.load(rows_ptr[:, None] + (first + d)[None, :])
    else:
        return tl.load(rows_ptr[:, None] + (first + d)[None, :], mask=(d < SIZE)[None, :], other=0.0)


@triton.jit
def latent_loop(
    q_ptr,  # [ROWS] of the queries
    row_pos,  # [ROWS] the position of each row's token
    pages_ptr,  # of the sequence
    cache_ptr, again_ptr, scales_ptr, begin, end, scale,
    R: tl.constexpr, WIDTH_R: tl.constexpr, L: tl.constexpr, WIDTH_L: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return ``highest``, ``total`` and ``sums`` of the online softmax over positions ``begin`` to ``end``."""
    FLOAT: tl.constexpr = q_ptr.dtype.element_ty
    q, turned = _columns(q_ptr, R, L, WIDTH_L), _columns(q_ptr, 0, R, WIDTH_R)
    highest, total, sums = no_positions(row_pos.shape[0], WIDTH_L)
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        position = first + tl.arange(0, TILE)
        # Positions beyond the end load the last one again with weight 0; see attention_loop.
        slot_position = tl.minimum(position, end - 1).to(tl.uint32)
        slot = tl.load(pages_ptr + slot_position // PAGE).to(tl.int64) * PAGE + slot_position % PAGE
        latents = as_float(_columns(cache_ptr + slot * (R + L), R, L, WIDTH_L), FLOAT)
        if SCALED:
            scores = product(q, tl.trans(as_float(_columns(again_ptr + slot * (R + L), R, L, WIDTH_L), FLOAT)))
        else:
            scores = product(q, tl.trans(latents))
        if R > 0:
            scores += product(turned, tl.trans(as_float(_columns(cache_ptr + slot * (R + L), 0, R, WIDTH_R), FLOAT)))
        scores *= scale
        if SCALED:
            scores *= tl.load(scales_ptr + slot)[None, :]
        scores = tl.where(position[None, :] <= row_pos[:, None], scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        # A row without any visible position so far stays at minus infinity; 0 instead avoids inf - inf.
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        if SCALED:
            weights *= tl.load(scales_ptr + slot)[None, :]
        sums = sums * decay[:, None] + product(weights.to(FLOAT), latents)
        highest = now
    return highest, total, sums


@triton.jit(do_not_specialize=["S"])
def latent_decode_kernel(
    q_ptr,  # [S, H * (R + L)], rows q_stride apart
    cache_ptr,
    again_ptr,  # the cache again, if SCALED: two loads of the same address would be merged
    scales_ptr,  # [pages * P] float32, if SCALED
    table_ptr,  # [S, most pages] int32
    lengths_ptr,  # [S] int32
    items_ptr,  # [items, 3] int32: sequence, first position, end
    starts_ptr,  # [S + 1] int32
    S,
    parts_ptr,  # [items, H, L] float32
    peaks_ptr,  # [items, H, 2] float32: the highest score and the sum
    q_stride, table_stride,
    scale,  # times log2(e)
    H: tl.constexpr,
    HEADS: tl.constexpr,  # of a program, a power of two
    R: tl.constexpr, WIDTH_R: tl.constexpr, L: tl.constexpr, WIDTH_L: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One split of one sequence's positions for HEADS heads. Programs of other heads, which read the same positions,
    run beside it.
    """
    item = tl.program_id(1).to(tl.int64)
    if item >= tl.load(starts_ptr + S):
        return
    sequence, begin, end = positions_of(item, items_ptr)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    length = tl.load(lengths_ptr + sequence)
    # Rows beyond the last head repeat it and are not stored.
    rows_ptr = q_ptr + sequence * q_stride + tl.minimum(head, H - 1) * (R + L)
    row_pos = tl.zeros((HEADS,), tl.int32) + (length - 1)
    highest, total, sums = latent_loop(
        rows_ptr, row_pos, table_ptr + sequence * table_stride, cache_ptr, again_ptr, scales_ptr, begin, end, scale,
        R, WIDTH_R, L, WIDTH_L, PAGE, TILE, SCALED, STAGES,
    )  # fmt: skip
    row = item * H + head
    store_values(parts_ptr + row * L, sums, head < H, L, WIDTH_L)
    tl.store(peaks_ptr + row * 2, highest, mask=head < H)
    tl.store(peaks_ptr + row * 2 + 1, total, mask=head < H)


@triton.jit
def latent_prefill_kernel(
    q_ptr,  # [T, H * (R + L)], rows q_stride apart
    cache_ptr,
    again_ptr,
    scales_ptr,
    table_ptr,
    lengths_ptr,
    starts_ptr,  # [S + 1] int32: where a sequence's tokens begin
    blocks_ptr,  # [blocks, 2] int32: sequence, first of its tokens
    out_ptr,  # [T, H * L]
    q_stride, out_stride, table_stride, scale,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program, a power of two
    R: tl.constexpr, WIDTH_R: tl.constexpr, L: tl.constexpr, WIDTH_L: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """HEADS heads of up to TOKENS tokens of a sequence, over the positions up to their own."""
    sequence, offset, start, count, length = tokens_of(tl.program_id(0), blocks_ptr, starts_ptr, lengths_ptr)
    row = tl.arange(0, HEADS * TOKENS)
    head = tl.program_id(1) * HEADS + row % HEADS
    # Rows beyond the last head or token repeat it and are not stored.
    token = tl.minimum(offset + row // HEADS, count - 1)
    valid = (head < H) & (offset + row // HEADS < count)
    line = (start + token).to(tl.int64)
    end = length - count + tl.minimum(offset + TOKENS, count)
    rows_ptr = q_ptr + line * q_stride + tl.minimum(head, H - 1) * (R + L)
    highest, total, sums = latent_loop(
        rows_ptr, length - count + token, table_ptr + sequence * table_stride, cache_ptr, again_ptr, scales_ptr, 0, end,
        scale, R, WIDTH_R, L, WIDTH_L, PAGE, TILE, SCALED, STAGES,
    )  # fmt: skip
    out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
    store_values(out_ptr + line * out_stride + head * L, out, valid, L, WIDTH_L)
