"""Grouped RMS norm with a gate."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_norm_kernel(
    x_ptr,  # [M, D]
    gate_ptr,  # [M, D]
    weight_ptr,  # [D] float32
    y_ptr,  # [M, D]
    x_stride,
    gate_stride,
    y_stride,
    epsilon,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr = False,
):
    """norm(x) * weight * silu(gate), or norm(x * silu(gate)) * weight if GATE_FIRST; sigmoid for silu if SIGMOID. One
    group of a row per program.
    """
    row = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    mask = inside < GROUP
    at = tl.program_id(1) * GROUP + inside
    x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    factor = (1.0 if SIGMOID else gate) / (1.0 + tl.exp(-gate))
    if GATE_FIRST:
        x *= factor
    y = x * tl.rsqrt(tl.sum(x * x, 0) / GROUP + epsilon) * tl.load(weight_ptr + at, mask=mask, other=0.0)
    if not GATE_FIRST:
        y *= factor
    tl.store(y_ptr + row * y_stride + at, y.to(y_ptr.dtype.element_ty), mask=mask)
