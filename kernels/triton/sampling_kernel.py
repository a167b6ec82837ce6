"""Sampling on GPUs: masks over the vocabulary, a bit for each token, and the most likely token of each row."""

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


@triton.jit
def _finite_base(highest):
    """Return what exponents are taken relative to: 0 if nothing is above -inf, which avoids inf - inf."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def greedy_parts_kernel(
    raw_ptr,  # [R, V] float32
    logits_ptr,  # [R, V] float32
    parts_ptr,  # [R, parts, 3] float32: the highest raw logit, the sum of exponentials, the highest logit
    tokens_ptr,  # [R, parts] int32: the first token with that logit
    raw_stride,
    logits_stride,
    vocab,
    SAME: tl.constexpr,  # whether logits are the raw ones
    WIDTH: tl.constexpr,
):
    """WIDTH tokens of one row per program."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    token = part * WIDTH + tl.arange(0, WIDTH)
    raw = tl.load(raw_ptr + row * raw_stride + token, mask=token < vocab, other=float("-inf"))
    highest = tl.max(raw, 0)
    total = tl.sum(tl.exp(raw - _finite_base(highest)), 0)
    logits = raw if SAME else tl.load(logits_ptr + row * logits_stride + token, mask=token < vocab, other=float("-inf"))
    best, at = tl.max(logits, 0, return_indices=True, return_indices_tie_break_left=True)
    place = row * tl.num_programs(1) + part
    tl.store(parts_ptr + place * 3, highest)
    tl.store(parts_ptr + place * 3 + 1, total)
    tl.store(parts_ptr + place * 3 + 2, best)
    # Among logits that are not numbers, which fail later, the index may be that of a masked lane.
    tl.store(tokens_ptr + place, tl.minimum(part * WIDTH + at, vocab - 1))


@triton.jit
def greedy_kernel(
    raw_ptr,  # [R, V] float32
    parts_ptr,  # [R, parts, 3] float32
    part_tokens_ptr,  # [R, parts] int32
    tokens_ptr,  # [R] int64
    normalizers_ptr,  # [R] float32: logarithms of the sums of exponentials of raw logits
    packed_ptr,  # [6, R] float32: see TorchSampler
    raw_stride,
    parts,
    PARTS: tl.constexpr,  # a power of two
):
    """The most likely token of one row per program, and what the host gets of it; its rank is 1."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    part = tl.arange(0, PARTS)
    place = row * parts + part
    mask = part < parts
    highest = tl.load(parts_ptr + place * 3, mask=mask, other=float("-inf"))
    total = tl.load(parts_ptr + place * 3 + 1, mask=mask, other=0.0)
    base = _finite_base(tl.max(highest, 0))
    normalizer = base + tl.log(tl.sum(total * tl.exp(highest - base), 0))
    logits = tl.load(parts_ptr + place * 3 + 2, mask=mask, other=float("-inf"))
    best, at = tl.max(logits, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(part_tokens_ptr + row * parts + tl.minimum(at, parts - 1))
    logprob = tl.load(raw_ptr + row * raw_stride + token) - normalizer
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(normalizers_ptr + row, normalizer)
    is_finite = tl.abs(normalizer) < float("inf")
    tl.store(packed_ptr + row, token.to(tl.float32))  # exact below 2**24
    tl.store(packed_ptr + rows + row, logprob)
    tl.store(packed_ptr + 2 * rows + row, is_finite.to(tl.float32))
    tl.store(packed_ptr + 3 * rows + row, (best > float("-inf")).to(tl.float32))
    tl.store(packed_ptr + 4 * rows + row, 1.0)
    tl.store(packed_ptr + 5 * rows + row, 1.0)
