"""Launcher of linear_int8_kernel.py: 8-bit weights, 8-bit activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.triton.layouts import QuantizedLayout, block_for, warps_for
from aiakq.kernels.types import LinearInput, LinearProblem, QuantizedActivation, QWeight

if TYPE_CHECKING:
    from aiakq.kernels.triton.configs import Config


#: Outputs are padded to multiples of this, the maximum per program.
WIDEST = 256


def supports(problem: LinearProblem) -> str | None:
    """Return None, or why not."""
    return fits(problem) or triton.unavailable_reason("w8a8 linear")


def fits(problem: LinearProblem) -> str | None:
    """Return None if the layout can hold such a weight, or why not."""
    if problem.scheme != "w8a8":
        return f"it has no {problem.scheme}"
    if problem.dtype not in (*triton.DTYPES, torch.float32):
        return f"activations are float32, float16 or bfloat16, not {problem.dtype}"
    if problem.group_size != problem.k or problem.has_zeros or problem.has_perm:
        return "weights have one scale per output, no zero point and no order"
    if problem.k % 32:
        return "inputs come in multiples of 32"
    return None


@dataclass(eq=False)
class Int8Linear(LinearLayer):
    """Weights [N padded, K] int8 and their scales [N padded] float32; ``input_scale`` [1] float32 if static."""

    weights: Tensor
    scales: Tensor
    input_scale: Tensor | None
    bias: Tensor | None
    n: int
    k: int

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K], or in the layout of ``input_layout(M)`` -> [M, N] of the same dtype."""
        if isinstance(x, QuantizedActivation):
            return multiply(x.codes, x.scales, self, x.dtype)
        assert isinstance(x, Tensor)
        if x.stride(1) != 1:
            x = x.contiguous()
        codes, scales = quantize(x, self.input_scale)
        return multiply(codes, scales, self, x.dtype)

    def input_layout(self, m: int) -> QuantizedLayout:
        """Return the layout that a norm or an activation function can write for this layer."""
        return QuantizedLayout(self.input_scale)


def prepare(weight: QWeight, problem: LinearProblem) -> Int8Linear:
    """Pack ``weight`` (not modified) into the layout."""
    padding = -weight.n % WIDEST
    codes = (weight.codes.to(torch.int16) - 128).to(torch.int8)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, padding)).contiguous()
    scales = torch.nn.functional.pad(weight.scales.reshape(-1).float(), (0, padding)).contiguous()
    given = None if weight.input_scale is None else weight.input_scale.float().reshape(1).contiguous()
    bias = None if weight.bias is None else weight.bias.to(problem.dtype).contiguous()
    return Int8Linear(codes, scales, given, bias, weight.n, weight.k)


def step_of(k: int) -> int:
    """Return the number of inputs per inner step, the largest that divides ``k``."""
    return next(step for step in (128, 64, 32) if k % step == 0)


def quantize(x: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] -> codes [M, K] int8 and scales [M] float32: max |x| / 127 per row, or the static scale."""
    from aiakq.kernels.triton.linear_int8_kernel import quantize_kernel

    m, k = x.shape
    codes = torch.empty(m, k, dtype=torch.int8, device=x.device)
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    if m == 0:
        return codes, scales
    block = block_for(k)
    quantize_kernel[(m,)](
        x, codes, scales, scales if input_scale is None else input_scale, x.stride(0),
        K=k, BLOCK=block, GIVEN=input_scale is not None, num_warps=warps_for(block),
    )  # fmt: skip
    return codes, scales


def multiply(
    codes: Tensor, scales: Tensor, state: Int8Linear, dtype: torch.dtype, config: Config | None = None
) -> Tensor:
    """Multiply codes [M, K] int8 with scales [M] by the weight -> [M, N] of ``dtype``."""
    from aiakq.kernels.triton import configs
    from aiakq.kernels.triton.linear_int8_kernel import integers_kernel

    m, k = codes.shape
    if m == 0:
        return torch.empty(0, state.n, dtype=dtype, device=codes.device)
    bk = step_of(k)
    c = config or configs.choose("integers", codes.device, 8, state.n, k // bk, m)
    split = min(c.split, k // bk)
    y = torch.empty(m, state.n, dtype=dtype, device=codes.device)
    grid = (-(-m // c.bm), -(-state.n // c.bn), split)
    parts = y if split == 1 else torch.empty(split, m, state.n, dtype=torch.int32, device=codes.device)
    counts = y if split == 1 else configs.counters(codes.device, grid[0] * grid[1])
    integers_kernel[grid](
        codes, scales, state.weights, state.scales, y if state.bias is None else state.bias, y, parts, counts,
        y.stride(0), m, state.n,
        K=k, BN=c.bn, BM=c.bm, BK=bk, SPLIT=split, STAGES=c.stages, WEIGHTS_LEFT=c.weights_left,
        BIAS=state.bias is not None, num_warps=c.warps,
    )  # fmt: skip
    return y
