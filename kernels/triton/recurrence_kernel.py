"""Linear recurrences (Mamba 2 state space, gated delta rule), token by token.

A program keeps some columns of one head's state in registers and iterates over the tokens of a sequence, so that states
are read and written once per step for any number of tokens. Columns are independent of each other.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + e^x), accurate to float32 also for small values."""
    small = tl.exp(-tl.abs(x))
    whole = 1.0 + small
    # Compensate the rounding error of the sum (Kahan's log1p).
    lost = whole - 1.0
    log = tl.where(lost > 0, tl.log(whole) * (small / tl.where(lost > 0, lost, 1.0)), small)
    return tl.maximum(x, 0.0) + log


@triton.jit
def _advance(
    state, query, key, value, step, rate, mix, skip, factor, epsilon, DELTA: tl.constexpr, SKIP: tl.constexpr,
    STRENGTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return the state [WIDTH, BLOCK] after a token and the output of its query [WIDTH]; ``mix`` is the input of b,
    ``step`` a number, or if CHANNELS [WIDTH].
    """
    if CHANNELS:
        state *= tl.exp(rate * step)[:, None]
    else:
        state *= tl.exp(rate * step)
    if DELTA:
        query *= tl.rsqrt(tl.sum(query * query, 0) + epsilon) * factor
        key *= tl.rsqrt(tl.sum(key * key, 0) + epsilon)
        change = (value - tl.sum(state * key[:, None], 0)) / (1.0 + tl.exp(-mix))
        if STRENGTH != 1:
            change *= STRENGTH
    else:
        change = step * value
    state += key[:, None] * change[None, :]
    y = tl.sum(state * query[:, None], 0)
    return state, y + skip * value if SKIP else y


@triton.jit
def places(
    x_ptr, key_at, value_at, H: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DELTA: tl.constexpr
):
    """Return the addresses of a head's query, key and value in the row at ``x_ptr``."""
    if DELTA:
        return x_ptr + key_at, x_ptr + HK * DK + key_at, x_ptr + 2 * HK * DK + value_at
    else:
        return x_ptr + H * DV + HK * DK + key_at, x_ptr + H * DV + key_at, x_ptr + value_at


@triton.jit
def _of_head(numbers_ptr, head, FIRST: tl.constexpr, k, there, DK: tl.constexpr, CHANNELS: tl.constexpr):
    """Load the number of a head, or if CHANNELS those of its keys' elements ``k``, behind the first FIRST numbers."""
    if CHANNELS:
        return tl.load(numbers_ptr + FIRST + head * DK + k, mask=there, other=0.0)
    else:
        return tl.load(numbers_ptr + FIRST + head)


@triton.jit(do_not_specialize=["most"])
def recurrence_kernel(
    x_ptr,  # [T, width]: queries, keys and values if DELTA, else values, keys and queries
    gates_ptr,  # [T, H], or if DELTA [T, 2 H], or if CHANNELS [T, H + H * DK]
    rate_ptr,  # [H] float32
    bias_ptr,  # [H] float32, or if CHANNELS [H * DK]
    skip_ptr,  # [H] float32
    states_ptr,  # [rows, H, DK, DV] float32
    sources_ptr,  # this, firsts_ptr and saves_ptr: see StateTables
    starts_ptr,  # [S + 1] int32: where a sequence's tokens begin
    firsts_ptr,
    saves_ptr,
    y_ptr,  # [T, H * DV]
    x_stride, gates_stride,
    most,  # tokens of a sequence; longer ones are computed in chunks
    low, high, factor, epsilon,  # factor: of the delta rule's queries
    H: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    DELTA: tl.constexpr, SKIP: tl.constexpr, STRENGTH: tl.constexpr = 1.0, CHANNELS: tl.constexpr = False,
):  # fmt: skip
    """All tokens of a sequence, BLOCK columns of one head."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    k = tl.arange(0, WIDTH)
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key_there, value_there = k < DK, v < DV
    mask = key_there[:, None] & value_there[None, :]
    inside = k[:, None] * DV + v[None, :]
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    count = tl.load(starts_ptr + sequence + 1) - start.to(tl.int32)
    if count > most:
        return
    source = tl.load(sources_ptr + sequence).to(tl.int64)
    state = tl.load(states_ptr + (source * H + head) * (DK * DV) + inside, mask=mask, other=0.0)
    rate, bias = tl.load(rate_ptr + head), _of_head(bias_ptr, head, 0, k, key_there, DK, CHANNELS)
    skip = tl.load(skip_ptr + head) if SKIP else 0.0
    value_at = head * DV + v
    x_ptr += start * x_stride
    gates_ptr += start * gates_stride
    y_ptr += start * (H * DV) + value_at
    query_ptr, key_ptr, value_ptr = places(x_ptr, head // (H // HK) * DK + k, value_at, H, HK, DK, DV, DELTA)
    first, last = tl.load(firsts_ptr + sequence), tl.load(firsts_ptr + sequence + 1)
    # Advance from each saved state to the next, and finally to the end. ``begin`` is loaded, not carried over: Triton
    # (3.2 to 3.9) removes carried values that only bound an inner loop, which would then start at token 0 every time.
    for number in range(first, last + 1):
        keeps = number < last
        begin = tl.load(saves_ptr + 3 * number - 2, mask=number > first, other=-1) + 1
        end = tl.load(saves_ptr + 3 * number + 1, mask=keeps, other=count - 1) + 1
        for token in tl.range(begin, end, num_stages=3):
            line = tl.cast(token, tl.int64)
            query = tl.load(query_ptr + line * x_stride, mask=key_there, other=0.0).to(tl.float32)
            key = tl.load(key_ptr + line * x_stride, mask=key_there, other=0.0).to(tl.float32)
            value = tl.load(value_ptr + line * x_stride, mask=value_there, other=0.0).to(tl.float32)
            gates_row = gates_ptr + line * gates_stride
            step = _of_head(gates_row, head, H if DELTA else 0, k, key_there, DK, CHANNELS)
            step = tl.minimum(tl.maximum(softplus(step.to(tl.float32) + bias), low), high)
            mix = tl.load(gates_row + head).to(tl.float32) if DELTA else 0.0
            state, y = _advance(
                state, query, key, value, step, rate, mix, skip, factor, epsilon, DELTA, SKIP, STRENGTH, CHANNELS
            )
            tl.store(y_ptr + line * (H * DV), y.to(y_ptr.dtype.element_ty), mask=value_there)
        row = tl.load(saves_ptr + 3 * number + 2, mask=keeps, other=0).to(tl.int64)
        tl.store(states_ptr + (row * H + head) * (DK * DV) + inside, state, mask=mask & keeps)
