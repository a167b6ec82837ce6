"""Masks over the vocabulary: a bit for each token, applied to logits in place."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mask_kernel(
    logits_ptr,  # [R, V] float32
    rows_ptr,  # [N] int64
    bits_ptr,  # [N, W] int32
    logits_stride,
    bits_stride,
    vocab,
    WORDS: tl.constexpr,
):
    """Apply WORDS words of the mask of one row per program."""
    line = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + line)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bits_ptr + line * bits_stride + words, mask=words * 32 < vocab, other=0)
    lanes = tl.arange(0, 32)
    forbidden = ((bits[:, None] >> lanes[None, :]) & 1) == 0
    tokens = words[:, None] * 32 + lanes[None, :]
    places = logits_ptr + row * logits_stride + tokens
    tl.store(places, tl.full([WORDS, 32], float("-inf"), tl.float32), mask=forbidden & (tokens < vocab))
