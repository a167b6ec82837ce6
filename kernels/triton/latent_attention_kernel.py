"""Attention over a paged cache of latents (MLA; DeepSeek-V2 2024, arXiv:2405.04434), for decoding and for prompts.

All heads share the one key of a position, whose first R elements are rotated and whose last L are the latent, which is
its value, too. Rows of a tile are heads of a few neighbouring tokens. A tile of latents is multiplied twice: with the
queries' latent part, to which the product of the rotated parts is added, and with the weights. So neither part is
padded to a power of two that holds both.

Caches are [pages, P, 1, R + L] in the types of attention_kernel.py, whose softmax and whose parts of sequences these
are. Latents of 16 bits are loaded once. Triton loads those of 8 bits ahead only if a load has one use, so they are
loaded twice, the second time from the GPU's own cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.attention_kernel import as_float, no_positions, product, store_values, tokens_of


@triton.jit
def _columns(rows_ptr, first, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Elements ``first`` to ``first + SIZE`` of the rows at ``rows_ptr`` [TILE]: [TILE, WIDTH], zeros beyond them."""
    d = tl.arange(0, WIDTH)
    if SIZE == WIDTH:
        return tl.load(rows_ptr[:, None] + (first + d)[None, :])
    else:
        return tl.load(rows_ptr[:, None] + (first + d)[None, :], mask=(d < SIZE)[None, :], other=0.0)


@triton.jit
def latent_kernel(
    q_ptr,  # [T, H * (R + L)], rows q_stride apart
    cache_ptr,
    again_ptr,  # the cache once more, if SCALED: two loads of one address would become one
    scales_ptr,  # [pages * P] float32, if SCALED
    table_ptr,  # [S, most pages] int32
    lengths_ptr,  # [S] int32
    starts_ptr,  # [S + 1] int32: where a sequence's tokens begin; like blocks_ptr not read if DECODING
    blocks_ptr,  # [blocks, 2] int32: sequence, first of its tokens
    out_ptr,  # [T, H * L]
    parts_ptr,  # [S, H, SPLIT, L] float32; like peaks_ptr only written if DECODING
    peaks_ptr,  # [S, H, SPLIT, 2] float32: the highest score and the sum
    q_stride, out_stride, table_stride, scale,
    H: tl.constexpr,
    HEADS: tl.constexpr,  # of a program, a power of two
    TOKENS: tl.constexpr,  # of a program, a power of two
    R: tl.constexpr, WIDTH_R: tl.constexpr, L: tl.constexpr, WIDTH_L: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, DECODING: tl.constexpr, SCALED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """HEADS heads of up to TOKENS tokens of a sequence, over the positions up to their own; if DECODING one part of
    the positions of a sequence of one token. ``scale`` includes log2(e).
    """
    ROWS: tl.constexpr = HEADS * TOKENS
    D: tl.constexpr = R + L
    FLOAT: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)
    head = tl.program_id(1) * HEADS + row % HEADS
    if DECODING:
        sequence = tl.program_id(0).to(tl.int64)
        length = tl.load(lengths_ptr + sequence)
        own = tl.zeros((ROWS,), tl.int32) + (length - 1)
        line = tl.zeros((ROWS,), tl.int64) + sequence
        valid = head < H
        tiles = tl.cdiv(length, TILE)
        part = tl.program_id(2)
        begin = tiles * part // SPLIT * TILE
        end = tl.minimum(tiles * (part + 1) // SPLIT * TILE, length)
    else:
        sequence, offset, start, count, length = tokens_of(tl.program_id(0), blocks_ptr, starts_ptr, lengths_ptr)
        token = offset + row // HEADS
        valid = (head < H) & (token < count)
        own = length - count + tl.minimum(token, count - 1)
        line = (start + tl.minimum(token, count - 1)).to(tl.int64)
        begin = 0
        end = length - count + tl.minimum(offset + TOKENS, count)
    # Rows beyond the heads and the tokens are those of the last ones, and are not stored.
    q_ptr += line * q_stride + tl.minimum(head, H - 1) * D
    q, turned = _columns(q_ptr, R, L, WIDTH_L), _columns(q_ptr, 0, R, WIDTH_R)
    highest, total, sums = no_positions(ROWS, WIDTH_L)
    inside = tl.arange(0, TILE)
    pages_ptr = table_ptr + sequence * table_stride
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        position = first + inside
        # What is beyond the end is the last one again, with no weight: see attention_loop.
        place = tl.minimum(position, end - 1).to(tl.uint32)
        slot = tl.load(pages_ptr + place // PAGE).to(tl.int64) * PAGE + place % PAGE
        latents = as_float(_columns(cache_ptr + slot * D, R, L, WIDTH_L), FLOAT)
        if SCALED:
            scores = product(q, tl.trans(as_float(_columns(again_ptr + slot * D, R, L, WIDTH_L), FLOAT)))
        else:
            scores = product(q, tl.trans(latents))
        if R > 0:
            scores += product(turned, tl.trans(as_float(_columns(cache_ptr + slot * D, 0, R, WIDTH_R), FLOAT)))
        scores *= scale
        if SCALED:
            scores *= tl.load(scales_ptr + slot)[None, :]
        scores = tl.where(position[None, :] <= own[:, None], scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet stays at minus infinity; 0 instead avoids inf - inf.
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        if SCALED:
            weights *= tl.load(scales_ptr + slot)[None, :]
        sums = sums * decay[:, None] + product(weights.to(FLOAT), latents)
        highest = now
    if DECODING:
        row_part = (sequence * H + head) * SPLIT + part
        store_values(parts_ptr + row_part * L, sums, valid, L, WIDTH_L)
        tl.store(peaks_ptr + row_part * 2, highest, mask=valid)
        tl.store(peaks_ptr + row_part * 2 + 1, total, mask=valid)
    else:
        out = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
        store_values(out_ptr + line * out_stride + head * L, out, valid, L, WIDTH_L)
