"""Quantized linear layers of 8-bit weights and 8-bit activations on NVIDIA GPUs, through integers.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiakq.kernels.triton import DTYPES, trouble
from aiakq.kernels.types import LinearProblem, QWeight, Rounded, Rounding

if TYPE_CHECKING:
    from aiakq.kernels.triton.configs import Config


#: Outputs come in multiples of this: the most that a program computes.
WIDEST = 256


def supports(problem: LinearProblem) -> str | None:
    """None, or why not."""
    if problem.device != "cuda":
        return "it runs on NVIDIA GPUs"
    return fits(problem) or trouble()


def fits(problem: LinearProblem) -> str | None:
    """None if the layout can hold such a weight, or why not."""
    if problem.scheme != "w8a8":
        return f"it has no {problem.scheme}"
    if problem.dtype not in (*DTYPES, torch.float32):
        return f"activations are float32, float16 or bfloat16, not {problem.dtype}"
    if problem.group_size != problem.k or problem.has_zeros or problem.has_perm:
        return "weights have one scale per output, no zero point and no order"
    if problem.k % 32:
        return "inputs come in multiples of 32"
    return None


@dataclass
class Packed:
    """Weights [N padded, K] int8 and their scales [N padded] float32; ``given`` is a stored activation scale."""

    weights: Tensor
    scales: Tensor
    given: Tensor | None
    bias: Tensor | None
    n: int
    k: int


def prepare(weight: QWeight, problem: LinearProblem) -> Packed:
    """Bring ``weight`` (not modified) into the layout."""
    padding = -weight.n % WIDEST
    codes = (weight.codes.to(torch.int16) - 128).to(torch.int8)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, padding)).contiguous()
    scales = torch.nn.functional.pad(weight.scales.reshape(-1).float(), (0, padding)).contiguous()
    given = None if weight.input_scale is None else weight.input_scale.float().reshape(1).contiguous()
    bias = None if weight.bias is None else weight.bias.to(problem.dtype).contiguous()
    return Packed(codes, scales, given, bias, weight.n, weight.k)


def step_of(k: int) -> int:
    """Inputs of an inner step: the most of them that ``k`` is a multiple of."""
    return next(step for step in (128, 64, 32) if k % step == 0)


def quantize(x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes [M, K] int8 and scales [M] float32."""
    from aiakq.kernels.triton.linear_int8_kernel import quantize_kernel
    from aiakq.kernels.triton.rows import warps_for

    m, k = x.shape
    codes = torch.empty(m, k, dtype=torch.int8, device=x.device)
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    if m == 0:
        return codes, scales
    block = 1 << (k - 1).bit_length()
    quantize_kernel[(m,)](
        x, codes, scales, scales if given is None else given, x.stride(0),
        K=k, BLOCK=block, GIVEN=given is not None, num_warps=warps_for(block),
    )  # fmt: skip
    return codes, scales


def wish(state: Packed, m: int) -> Rounding:
    """What a norm or a gate may do for the layer behind it (layers.py)."""
    return Rounding(state.given)


def run(x: Tensor | Rounded, state: Packed) -> Tensor:
    """x [M, K] -> [M, N] of the same dtype."""
    if isinstance(x, Rounded):
        return multiply(x.codes, x.scales, state, x.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    codes, scales = quantize(x, state.given)
    return multiply(codes, scales, state, x.dtype)


def multiply(codes: Tensor, scales: Tensor, state: Packed, dtype: torch.dtype, config: Config | None = None) -> Tensor:
    """codes [M, K] int8 with their scales [M] -> [M, N] of ``dtype``."""
    from aiakq.kernels.triton import configs
    from aiakq.kernels.triton.linear_int8_kernel import integers_kernel

    m, k = codes.shape
    if m == 0:
        return torch.empty(0, state.n, dtype=dtype, device=codes.device)
    bk = step_of(k)
    c = config or configs.choose("integers", codes.device, 8, state.n, k // bk, m)
    split = min(c.split, k // bk)
    y = torch.empty(m, state.n, dtype=dtype, device=codes.device)
    grid = (-(-state.n // c.bn), -(-m // c.bm), split)
    parts = y if split == 1 else torch.empty(split, m, state.n, dtype=torch.int32, device=codes.device)
    counts = y if split == 1 else configs.counters(codes.device, grid[0] * grid[1])
    integers_kernel[grid](
        codes, scales, state.weights, state.scales, y if state.bias is None else state.bias, y, y, parts, counts,
        y.stride(0), m, state.n,
        K=k, BN=c.bn, BM=c.bm, BK=bk, SPLIT=split, STAGES=c.stages, WEIGHTS_LEFT=c.weights_left,
        BIAS=state.bias is not None, RESIDUAL=False, num_warps=c.warps,
    )  # fmt: skip
    return y
