"""Head norms, rotary embedding and KV cache writes, between the projections and attention.

One program per token and head. Query heads are rotated in place; key heads are rotated while being written to the
cache along with the values, unchanged or in 8 bits (int8, e4m3, e5m2) with a scale per token and head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aiakq.kernels.triton.language import INTERPRETED
from aiakq.kernels.triton.linear_int8_kernel import nearest


@triton.jit
def _turned(
    at_ptr,
    norm_ptr,
    epsilon,
    cosines_ptr,
    sines_ptr,
    d,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):
    """Load a head [WIDTH] float32, normalize it if NORM is 1, rotate its first ROTATED elements, each half with the
    other, or adjacent pairs if INTERLEAVED, and normalize it if NORM is 2.
    """
    FLOAT: tl.constexpr = at_ptr.dtype.element_ty
    HALF: tl.constexpr = ROTATED // 2
    mask = d < D
    x = tl.load(at_ptr + d, mask=mask, other=0.0).to(tl.float32)
    if ROTATED > 0:
        first = d % 2 == 0 if INTERLEAVED else d < HALF
        step = 1 if INTERLEAVED else HALF
        other_at = tl.where(first, d + step, d - step)
        turning = d < ROTATED
        other = tl.load(at_ptr + other_at, mask=turning, other=0.0).to(tl.float32)
    if NORM == 1:
        # Applies to all elements, also those not rotated; rounded like the result of a norm.
        factor = tl.rsqrt(tl.sum(x * x, 0) / D + epsilon)
        x = (x * factor).to(FLOAT).to(tl.float32) * tl.load(norm_ptr + d, mask=mask, other=0.0).to(tl.float32)
        x = x.to(FLOAT).to(tl.float32)
        if ROTATED > 0:
            weight = tl.load(norm_ptr + other_at, mask=turning, other=0.0).to(tl.float32)
            other = ((other * factor).to(FLOAT).to(tl.float32) * weight).to(FLOAT).to(tl.float32)
    if ROTATED > 0:
        angle = d // 2 if INTERLEAVED else tl.where(first, d, other_at)
        cosine = tl.load(cosines_ptr + angle, mask=turning, other=1.0)
        sine = tl.load(sines_ptr + angle, mask=turning, other=0.0)
        x = x * cosine + tl.where(first, -other, other) * sine
    if NORM == 2:
        x = x.to(FLOAT).to(tl.float32)  # as between operations
        factor = tl.rsqrt(tl.sum(x * x, 0) / D + epsilon)
        x = (x * factor).to(FLOAT).to(tl.float32) * tl.load(norm_ptr + d, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _keep(x, cache_ptr, scales_ptr, line, d, D: tl.constexpr, SCALED: tl.constexpr):
    """Write a head [WIDTH] float32 to row ``place`` of a cache."""
    mask = d < D
    if SCALED:
        KIND: tl.constexpr = cache_ptr.dtype.element_ty
        # LARGEST of types.py.
        MOST: tl.constexpr = 127.0 if KIND == tl.int8 else 448.0 if KIND == tl.float8e4nv else 16.0
        scale = tl.max(tl.where(mask, tl.abs(x), 0.0), 0) / MOST
        steps = tl.where(scale > 0, 1.0 / scale, 0.0)
        code = tl.minimum(tl.maximum(x * steps, -MOST), MOST)
        if KIND == tl.int8:
            code = nearest(code)
        elif INTERPRETED:
            # The interpreter's casts truncate where a GPU rounds: round to the kept digits here (Dekker's split).
            high = code * (2.0**20 + 1.0 if KIND == tl.float8e4nv else 2.0**21 + 1.0)
            code = high - (high - code)
        tl.store(cache_ptr + line * D + d, code.to(KIND), mask=mask)
        tl.store(scales_ptr + line, scale + tl.sum(tl.where(mask, x * 0.0, 0.0), 0))
    else:
        tl.store(cache_ptr + line * D + d, x.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    q_ptr,  # [T, H * D], in place
    k_ptr,  # [T, Hkv * D]
    v_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cosines_ptr,  # [positions, ROTATED / 2] float32
    sines_ptr,
    positions_ptr,  # [T] int64
    slots_ptr,  # [T] int64; 0 is padding, which is not written
    k_cache_ptr,  # [pages * P, Hkv, D]
    v_cache_ptr,  # [pages * P, Hkv, DV]; without values DV is 0
    k_scales_ptr,  # [pages * P, Hkv] float32
    v_scales_ptr,
    q_stride,
    k_stride,
    v_stride,
    epsilon,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,  # a power of two, at least D and DV
    WIDTH_Q: tl.constexpr,  # a power of two, at least the changed elements of a query head: D if NORM, else ROTATED
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,  # 1 for norms of heads before their rotation, 2 after it, 0 without
    SCALED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, WIDTH)
    position = tl.load(positions_ptr + token)
    cosines_ptr += position * (ROTATED // 2)
    sines_ptr += position * (ROTATED // 2)
    if head < H:
        CHANGED: tl.constexpr = D if NORM else ROTATED
        at = q_ptr + token * q_stride + head * D
        d_q = tl.arange(0, WIDTH_Q)
        q = _turned(at, q_norm_ptr, epsilon, cosines_ptr, sines_ptr, d_q, CHANGED, ROTATED, INTERLEAVED, NORM)
        # Other lanes read what this one writes: all must have loaded it before it is overwritten.
        tl.debug_barrier()
        tl.store(at + d_q, q.to(q_ptr.dtype.element_ty), mask=d_q < CHANGED)
    else:
        head -= H
        slot = tl.load(slots_ptr + token)
        if slot > 0:
            line = slot * HKV + head
            at = k_ptr + token * k_stride + head * D
            k = _turned(at, k_norm_ptr, epsilon, cosines_ptr, sines_ptr, d, D, ROTATED, INTERLEAVED, NORM)
            _keep(k, k_cache_ptr, k_scales_ptr, line, d, D, SCALED)
            if DV > 0:
                v = tl.load(v_ptr + token * v_stride + head * DV + d, mask=d < DV, other=0.0).to(tl.float32)
                _keep(v, v_cache_ptr, v_scales_ptr, line, d, DV, SCALED)
