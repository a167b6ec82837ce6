"""Causal depthwise convolution with a state.

A program computes a few tokens of one sequence, or the state to save after one of them. Every input is read from memory
or from the initial state, so that all tokens run in parallel and none depends on how the sequence is split into steps.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _inputs(
    token,  # [TOKENS] of the sequence; before the step's first one they are negative
    start,
    count,
    source,
    c,
    x_ptr, before_ptr, states_ptr, x_stride, before_stride, C: tl.constexpr, TAPS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Load the inputs at ``token``: [TOKENS, BLOCK] float32."""
    new = ((token >= 0) & (token < count))[:, None] & (c < C)[None, :]
    old = (token < 0)[:, None] & (c < C)[None, :]
    row = (start + token).to(tl.int64)[:, None]
    x = tl.load(x_ptr + row * x_stride + c[None, :], mask=new, other=0.0).to(tl.float32)
    if BEFORE:
        x *= tl.load(before_ptr + row * before_stride + c[None, :], mask=new, other=0.0).to(tl.float32)
    line = source * (TAPS - 1) + (token + (TAPS - 1))
    return tl.where(old, tl.load(states_ptr + line[:, None] * C + c[None, :], mask=old, other=0.0), x)


@triton.jit(do_not_specialize=["blocks"])
def convolution_kernel(
    x_ptr,  # [T, C]
    before_ptr,  # [T, C]
    after_ptr,  # [T, C]
    weight_ptr,  # [TAPS, C] float32
    bias_ptr,  # [C] float32
    states_ptr,  # [rows, TAPS - 1, C] float32
    sources_ptr,  # this, blocks_ptr and saves_ptr: see StateTables
    starts_ptr,  # [S + 1] int32: where a sequence's tokens begin
    blocks_ptr,
    saves_ptr,
    y_ptr,  # [T, C]
    x_stride, before_stride, after_stride, blocks,
    C: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a sequence or, from program ``blocks`` on, a state to save; BLOCK channels of either."""
    number = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    step = tl.arange(0, TOKENS)
    computes = number < blocks
    entry = blocks_ptr + 2 * number if computes else saves_ptr + 3 * (number - blocks)
    sequence = tl.load(entry)
    at = tl.load(entry + 1)
    start = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - start
    source = tl.load(sources_ptr + sequence).to(tl.int64)
    if computes:
        token = at + step
        mask = (token < count)[:, None] & (c < C)[None, :]
        y = tl.zeros((TOKENS, BLOCK), tl.float32)
        for tap in tl.static_range(TAPS):
            x = _inputs(
                token + (tap + 1 - TAPS), start, count, source, c, x_ptr, before_ptr, states_ptr, x_stride,
                before_stride, C, TAPS, BEFORE,
            )  # fmt: skip
            y += x * tl.load(weight_ptr + tap * C + c, mask=c < C, other=0.0)[None, :]
        if BIAS:
            y += tl.load(bias_ptr + c, mask=c < C, other=0.0)[None, :]
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        row = (start + token).to(tl.int64)[:, None]
        if AFTER:
            y *= tl.load(after_ptr + row * after_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * C + c[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        kept = tl.load(entry + 2).to(tl.int64)
        for first in tl.static_range(0, TAPS - 1, TOKENS):
            line = first + step
            x = _inputs(
                at + line + (2 - TAPS), start, at + 1, source, c, x_ptr, before_ptr, states_ptr, x_stride,
                before_stride, C, TAPS, BEFORE,
            )  # fmt: skip
            mask = (line < TAPS - 1)[:, None] & (c < C)[None, :]
            tl.store(states_ptr + (kept * (TAPS - 1) + line[:, None]) * C + c[None, :], x, mask=mask)
