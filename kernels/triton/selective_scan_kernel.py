"""Selective scans, token by token.

A program holds the states of BLOCK channels of one sequence and goes through all of its tokens, or one for decoding: a
token is one and the same step for any number of tokens. Channels are independent of each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.recurrence_kernel import softplus


@triton.jit
def selective_scan_kernel(
    x_ptr,  # [T, C], as steps_ptr and gate_ptr
    steps_ptr,
    keys_ptr,  # [T, N], as queries_ptr
    queries_ptr,
    gate_ptr,
    rate_ptr,  # [N, C] float32
    bias_ptr,  # [C] float32
    skip_ptr,  # [C] float32
    states_ptr,  # [rows, N, C] float32
    sources_ptr,  # this, firsts_ptr and saves_ptr: see StateTables
    starts_ptr,  # [S + 1] int32: where a sequence's tokens begin
    firsts_ptr,
    saves_ptr,
    y_ptr,  # [T, C]
    x_stride, steps_stride, keys_stride, queries_stride, gate_stride,
    C: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All tokens of a sequence, BLOCK channels."""
    sequence = tl.program_id(1)
    n = tl.arange(0, WIDTH)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, there = n < N, c < C
    mask = inside[:, None] & there[None, :]
    at = n[:, None] * C + c[None, :]
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    count = tl.load(starts_ptr + sequence + 1) - start.to(tl.int32)
    source = tl.load(sources_ptr + sequence).to(tl.int64)
    state = tl.load(states_ptr + source * (N * C) + at, mask=mask, other=0.0)
    rate = tl.load(rate_ptr + at, mask=mask, other=0.0)
    bias, skip = tl.load(bias_ptr + c, mask=there, other=0.0), tl.load(skip_ptr + c, mask=there, other=0.0)
    x_ptr += start * x_stride + c
    steps_ptr += start * steps_stride + c
    gate_ptr += start * gate_stride + c
    keys_ptr += start * keys_stride + n
    queries_ptr += start * queries_stride + n
    y_ptr += start * C + c
    first = tl.load(firsts_ptr + sequence)
    last = tl.load(firsts_ptr + sequence + 1)
    # From each saved state to the next, and finally to the end; ``begin`` is loaded, see recurrence_kernel.
    for number in range(first, last + 1):
        keeps = number < last
        begin = tl.load(saves_ptr + 3 * number - 2, mask=number > first, other=-1) + 1
        end = tl.load(saves_ptr + 3 * number + 1, mask=keeps, other=count - 1) + 1
        for token in tl.range(begin, end, num_stages=3):
            line = tl.cast(token, tl.int64)
            value = tl.load(x_ptr + line * x_stride, mask=there, other=0.0).to(tl.float32)
            step = tl.load(steps_ptr + line * steps_stride, mask=there, other=0.0).to(tl.float32)
            key = tl.load(keys_ptr + line * keys_stride, mask=inside, other=0.0).to(tl.float32)
            query = tl.load(queries_ptr + line * queries_stride, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(gate_ptr + line * gate_stride, mask=there, other=0.0).to(tl.float32)
            step = softplus(step + bias)
            state = state * tl.exp(rate * step[None, :]) + key[:, None] * (step * value)[None, :]
            y = tl.sum(state * query[:, None], 0) + skip * value
            y = y * gate / (1.0 + tl.exp(-gate))
            tl.store(y_ptr + line * C, y.to(y_ptr.dtype.element_ty), mask=there)
        row = tl.load(saves_ptr + 3 * number + 2, mask=keeps, other=0).to(tl.int64)
        tl.store(states_ptr + row * (N * C) + at, state, mask=mask & keeps)
