"""Linear recurrences of prompts in chunks of tokens, whose sums are products of matrices.

Within a chunk, with cumulative logarithms c of the decays, the changes u [C, DV] of a state S (ops/recurrence.py) are

    state_space    u_i = d_i v_i
    delta_rule     u = (I + A)^-1 diag(b) (v - diag(e^c) k S),    A_ij = b_i e^(c_i - c_j) k_i . k_j  for j < i

of normalized queries and keys; outputs and the state after the chunk follow:

    y_i = e^c_i q_i S + sum over j <= i of e^(c_i - c_j) (q_i . k_j) u_j
    S = e^c_C S + sum of e^(c_C - c_j) k_j u_j^T

(Yang et al. 2024, arXiv:2406.06484 and 2412.06464; Dao and Gu 2024, arXiv:2405.21060). chunk_kernel computes what does
not depend on S for all chunks at once, scan_kernel the rest, chunk after chunk. No exponential has a positive argument.

Tensor cores multiply bfloat16, of which a float32 is the sum of two within 2^-16. Keys and queries are multiplied as
they are given, and everything else in such halves, so that rounding the outputs remains the only visible error.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.language import dot
from aiakq.kernels.triton.recurrence_kernel import places, softplus

#: A logarithm whose exponential is 0 in float32.
VANISHED = tl.constexpr(-104.0)


@triton.jit
def _halves(x):
    """Return two bfloat16 tensors whose sum is float32 ``x`` within 2^-16."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _times(rows, high, low, acc):
    """acc + rows (high + low), for rows of activations."""
    if rows.dtype == tl.bfloat16:
        return dot(rows, high, dot(rows, low, acc))
    else:
        first, second = _halves(rows.to(tl.float32))
        return dot(first, high, dot(first, low, dot(second, high, acc)))


@triton.jit
def _product(a, b, acc):
    """acc + a b, all float32."""
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return dot(a_high, b_high, dot(a_high, b_low, dot(a_low, b_high, acc)))


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """Return the inverse of I + ``lower``, strictly lower triangular [CHUNK, CHUNK]; CHUNK is 2^LEVELS.

    The inverses of two adjacent diagonal blocks, with the block below the first one, give that of both together.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(i == j, 1.0, tl.where((i // 2 == j // 2) & (i > j), -lower, 0.0))
    zero = tl.zeros((CHUNK, CHUNK), tl.float32)
    for level in tl.range(1, LEVELS, num_stages=1):
        below = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        middle = _product(tl.where(below, lower, 0.0), inverse, zero)
        inverse -= _product(inverse, middle, zero)
    return inverse


@triton.jit
def _tile(rows_ptr, stride, there, size, WIDTH: tl.constexpr, FULL: tl.constexpr):
    """Load [C, WIDTH] of the rows from ``rows_ptr`` on; zeros where they are not ``there`` and, unless FULL, beyond
    ``size``.
    """
    d = tl.arange(0, WIDTH)
    at = tl.arange(0, there.shape[0])[:, None] * stride + d[None, :]
    if FULL:
        return tl.load(rows_ptr + at, mask=there[:, None], other=0.0)
    else:
        return tl.load(rows_ptr + at, mask=there[:, None] & (d < size)[None, :], other=0.0)


@triton.jit
def _store_state(state_ptr, state, DK: tl.constexpr, size, DV: tl.constexpr, FULL: tl.constexpr):
    """Store columns [WIDTH, BLOCK] of a state, unless FULL without what is beyond DK and ``size``."""
    k, v = tl.arange(0, state.shape[0])[:, None], tl.arange(0, state.shape[1])[None, :]
    if FULL:
        tl.store(state_ptr + k * DV + v, state)
    else:
        tl.store(state_ptr + k * DV + v, state, mask=(k < DK) & (v < size))


@triton.jit
def _store_halves(matrix_ptr, matrix, CHUNK: tl.constexpr):
    """Store both halves of a matrix [CHUNK, CHUNK], one behind the other."""
    at = tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    high, low = _halves(matrix)
    tl.store(matrix_ptr + at, high)
    tl.store(matrix_ptr + CHUNK * CHUNK + at, low)


@triton.jit
def _matrix_times(matrix_ptr, values, acc, CHUNK: tl.constexpr):
    """acc + the product of a matrix [CHUNK, CHUNK], stored in halves, and ``values`` [CHUNK, BLOCK]."""
    at = tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    first, second = tl.load(matrix_ptr + at), tl.load(matrix_ptr + CHUNK * CHUNK + at)
    high, low = _halves(values)
    return dot(first, high, dot(first, low, dot(second, high, acc)))


@triton.jit
def chunk_kernel(
    x_ptr,  # as in recurrence_kernel
    gates_ptr,
    rate_ptr,
    bias_ptr,
    chunks_ptr,  # [N, 3] int32: see ChunkTables
    factors_ptr,  # [H, 3, T] float32: cumulative logarithms; steps, or if DELTA factors of keys and of queries
    matrices_ptr,  # [N, H, 2, CHUNK, CHUNK] bfloat16: halves of e^(c_i - c_j) (q_i . k_j) for j <= i; if DELTA
    #                [N, H, 4, CHUNK, CHUNK], with (I + A)^-1 diag(b) after it
    T, x_stride, gates_stride, low, high,
    factor,  # of the delta rule's queries
    epsilon,
    H: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr, DELTA: tl.constexpr, STRENGTH: tl.constexpr = 1.0,
):  # fmt: skip
    """What one chunk of one head needs besides the state before it."""
    number = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(chunks_ptr + 3 * number).to(tl.int64)
    token = tl.arange(0, CHUNK)
    there = token < tl.load(chunks_ptr + 3 * number + 1)
    gates_row = gates_ptr + start * gates_stride + token * gates_stride + head
    step = tl.load(gates_row + H if DELTA else gates_row, mask=there, other=0.0).to(tl.float32)
    step = tl.minimum(tl.maximum(softplus(step + tl.load(bias_ptr + head)), low), high)
    log = tl.where(there, tl.maximum(tl.load(rate_ptr + head) * step, VANISHED), 0.0)
    log = tl.cumsum(log, 0)
    factors_ptr += tl.cast(head, tl.int64) * 3 * T + start + token
    tl.store(factors_ptr, log, mask=there)
    query_ptr, key_ptr, _ = places(x_ptr + start * x_stride, head // (H // HK) * DK, 0, H, HK, DK, DV, DELTA)
    query = _tile(query_ptr, x_stride, there, DK, WIDTH, DK == WIDTH)
    key = _tile(key_ptr, x_stride, there, DK, WIDTH, DK == WIDTH)
    zero = tl.zeros((CHUNK, CHUNK), tl.float32)
    decay = tl.exp(tl.minimum(log[:, None] - log[None, :], 0.0))
    scores = dot(query, tl.trans(key), zero) * decay
    matrices_ptr += (tl.cast(number, tl.int64) * H + head) * ((4 if DELTA else 2) * CHUNK * CHUNK)
    if DELTA:
        wide = key.to(tl.float32)
        of_key = tl.rsqrt(tl.sum(wide * wide, 1) + epsilon)
        wide = query.to(tl.float32)
        of_query = tl.rsqrt(tl.sum(wide * wide, 1) + epsilon) * factor
        tl.store(factors_ptr + T, of_key, mask=there)
        tl.store(factors_ptr + 2 * T, of_query, mask=there)
        scores *= of_query[:, None] * of_key[None, :]
    else:
        tl.store(factors_ptr + T, step, mask=there)
    _store_halves(matrices_ptr, tl.where(token[:, None] >= token[None, :], scores, 0.0), CHUNK)
    if DELTA:
        mix = 1.0 / (1.0 + tl.exp(-tl.load(gates_row, mask=there, other=0.0).to(tl.float32)))
        if STRENGTH != 1:
            mix *= STRENGTH
        lower = dot(key, tl.trans(key), zero) * decay * ((of_key * mix)[:, None] * of_key[None, :])
        inverse = _inverse(tl.where(token[:, None] > token[None, :], lower, 0.0), CHUNK, LEVELS) * mix[None, :]
        _store_halves(matrices_ptr + 2 * CHUNK * CHUNK, inverse, CHUNK)


@triton.jit
def scan_kernel(
    x_ptr, skip_ptr, states_ptr, sources_ptr,
    sequences_ptr,  # [L, 3] int32: see ChunkTables
    chunks_ptr, factors_ptr, matrices_ptr, y_ptr, T, x_stride,
    H: tl.constexpr, HK: tl.constexpr, DK: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All chunks of a sequence, BLOCK columns of one head; arguments as in chunk_kernel and recurrence_kernel."""
    head = tl.program_id(1)
    value_at = tl.program_id(0) * BLOCK
    sequences_ptr += 3 * tl.program_id(2)
    source = tl.load(sources_ptr + tl.load(sequences_ptr)).to(tl.int64)
    k, v = tl.arange(0, WIDTH)[:, None], value_at + tl.arange(0, BLOCK)[None, :]
    inside = (source * H + head) * (DK * DV) + k * DV + v
    state = tl.load(states_ptr + inside, mask=(k < DK) & (v < DV), other=0.0)
    skip = tl.load(skip_ptr + head) if SKIP else 0.0
    key_at = head // (H // HK) * DK
    factors_ptr += tl.cast(head, tl.int64) * 3 * T
    y_ptr += head * DV + value_at
    token = tl.arange(0, CHUNK)
    zero = tl.zeros((CHUNK, BLOCK), tl.float32)
    FULL: tl.constexpr = DK == WIDTH and DV % BLOCK == 0
    for number in tl.range(tl.load(sequences_ptr + 1), tl.load(sequences_ptr + 2), num_stages=STAGES):
        start = tl.load(chunks_ptr + 3 * number).to(tl.int64)
        there = token < tl.load(chunks_ptr + 3 * number + 1)
        rows_ptr = x_ptr + start * x_stride
        query_ptr, key_ptr, value_ptr = places(rows_ptr, key_at, head * DV + value_at, H, HK, DK, DV, DELTA)
        query = _tile(query_ptr, x_stride, there, DK, WIDTH, DK == WIDTH)
        key = _tile(key_ptr, x_stride, there, DK, WIDTH, DK == WIDTH)
        value = _tile(value_ptr, x_stride, there, DV - value_at, BLOCK, DV % BLOCK == 0).to(tl.float32)
        log = tl.load(factors_ptr + start + token, mask=there, other=0.0)
        second = tl.load(factors_ptr + T + start + token, mask=there, other=0.0)
        # Logarithms fall from token to token, and are 0 where there is none.
        total = tl.min(log, 0)
        before, after = tl.exp(log), tl.exp(total - log)
        high, low = _halves(state)
        matrices = matrices_ptr + (tl.cast(number, tl.int64) * H + head) * ((4 if DELTA else 2) * CHUNK * CHUNK)
        if DELTA:
            rest = value - _times(key, high, low, zero) * (before * second)[:, None]
            change = _matrix_times(matrices + 2 * CHUNK * CHUNK, rest, zero, CHUNK)
            after *= second
            before *= tl.load(factors_ptr + 2 * T + start + token, mask=there, other=0.0)
        else:
            change = value * second[:, None]
        y = _times(query, high, low, zero) * before[:, None]
        y = _matrix_times(matrices, change, y, CHUNK)
        if SKIP:
            y += skip * value
        out = y_ptr + start * (H * DV) + token[:, None] * (H * DV) + tl.arange(0, BLOCK)[None, :]
        if FULL:
            tl.store(out, y.to(y_ptr.dtype.element_ty), mask=there[:, None])
        else:
            tl.store(out, y.to(y_ptr.dtype.element_ty), mask=there[:, None] & (v < DV))
        kept_high, kept_low = _halves(change * after[:, None])
        state = _times(tl.trans(key), kept_high, kept_low, state * tl.exp(total))
        row = tl.load(chunks_ptr + 3 * number + 2).to(tl.int64)
        if row >= 0:  # not a mask: a store in another layout is not free
            _store_state(states_ptr + (row * H + head) * (DK * DV) + value_at, state, DK, DV - value_at, DV, FULL)
