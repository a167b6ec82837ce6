"""Launcher of linear_kernel.py: weights of 2, 3, 4 or 8 bits, 16-bit activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.triton.layouts import COLUMNS, PackedLayout, block_for, warps_for
from aiakq.kernels.types import LinearInput, LinearProblem, PackedActivation, QWeight

if TYPE_CHECKING:
    from aiakq.kernels.triton.configs import Config

#: Bits of a stored code for each scheme: 3-bit codes are stored in four bits.
STORED_BITS = {"w2a16": 2, "w3a16": 4, "w4a16": 4, "w8a16": 8}
#: Outputs per tile in memory, as in linear_kernel.py.
TILE = 64
#: Outputs are padded to multiples of this, the maximum per program.
WIDEST = 128


def supports(problem: LinearProblem) -> str | None:
    """Return None, or why not."""
    return fits(problem) or triton.unavailable_reason("weight-only linear")


def fits(problem: LinearProblem) -> str | None:
    """Return None if the layout can hold such a weight, or why not."""
    if problem.scheme not in STORED_BITS:
        return f"it has no {problem.scheme}"
    if problem.dtype not in triton.DTYPES:
        return f"activations are float16 or bfloat16, not {problem.dtype}"
    if inputs_per_plane(problem.k, problem.group_size, STORED_BITS[problem.scheme]) is None:
        return f"groups of {problem.group_size} of {problem.k} inputs do not fit its steps"
    return None


def inputs_per_plane(k: int, group: int, bits: int) -> int | None:
    """Return the inputs per plane and step (linear_kernel.py), or None if no step fits.

    A step is a multiple of groups, or a group a multiple of steps; a plane never spans two groups. Products need at
    least 16 inputs.
    """
    planes = 16 // bits
    for count in (128 // planes, 64 // planes, 32, 16):
        step = count * planes
        if count >= 16 and k % step == 0 and (group % step == 0 or (step % group == 0 and group % count == 0)):
            return count
    return None


@dataclass(eq=False)
class GroupedLinear(LinearLayer):
    """A weight in the layout of linear_kernel.py.

    words    [N padded / 64, steps, 64, plane] int16.
    grid     [groups, N padded] int32: scale and zero point, float16 each.
    factors  [N padded] float32, powers of two by which the scales of each output are multiplied.
    plane    inputs per plane and step.
    uncut_n  see LinearProblem.
    """

    words: Tensor
    grid: Tensor
    factors: Tensor
    perm: Tensor | None
    bias: Tensor | None
    n: int
    k: int
    group: int
    bits: int
    plane: int
    uncut_n: int = 0

    @property
    def step(self) -> int:
        """Number of inputs per step."""
        return self.plane * (16 // self.bits)

    @property
    def steps(self) -> int:
        """Number of steps over all inputs."""
        return self.k // self.step

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K], or in the layout of ``input_layout(M)`` -> [M, N] of the same dtype."""
        return run(x, self)

    def input_layout(self, m: int) -> PackedLayout | None:
        """Return the layout that a norm or an activation function can write for this layer."""
        return layout_for(self, m, choose(self, m))


def prepare(weight: QWeight, problem: LinearProblem) -> GroupedLinear:
    """Pack ``weight`` (not modified) into the layout."""
    bits = STORED_BITS[weight.scheme]
    plane = inputs_per_plane(weight.k, weight.group_size, bits)
    assert plane is not None
    planes, padding = 16 // bits, -weight.n % WIDEST
    codes = torch.nn.functional.pad(weight.codes, (0, 0, 0, padding))
    tiles = codes.view(-1, TILE, weight.k // (plane * planes), planes, plane).to(torch.int32)
    words = torch.zeros_like(tiles[:, :, :, 0])
    for number in range(planes):
        words |= tiles[:, :, :, number] << (number * bits)
    # Conversion to int16 keeps the lower bits; torch wraps around.
    words = words.to(torch.int16).transpose(1, 2).contiguous()
    # The default zero point 2^(bits - 1) is that of the scheme, not of the storage width.
    zeros = torch.full_like(weight.scales, 2 ** (weight.bits - 1)) if weight.zeros is None else weight.zeros
    factors = _factors(weight.scales)
    grid = _halves(weight.scales.float() / factors.unsqueeze(1), zeros, padding)
    factors = torch.nn.functional.pad(factors, (0, padding))
    bias = None if weight.bias is None else weight.bias.to(problem.dtype).contiguous()
    perm = None if weight.perm is None else weight.perm.to(torch.int32)
    return GroupedLinear(
        words, grid, factors, perm, bias, weight.n, weight.k, weight.group_size, bits, plane, problem.uncut_n
    )


def _factors(scales: Tensor) -> Tensor:
    """Compute per-output factors of scales [N, groups] -> [N] float32, powers of two: without them tiny scales would be
    subnormal in float16 and large ones infinite.
    """
    largest = scales.float().abs().amax(dim=1)
    largest = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return torch.exp2(torch.frexp(largest).exponent.float())


def _halves(scales: Tensor, zeros: Tensor, padding: int) -> Tensor:
    """Pack scales and zeros [N, groups] -> int32 [groups, N padded]: both as float16, the scale in the lower half."""
    low, high = (
        torch.nn.functional.pad(x.to(torch.float16), (0, 0, 0, padding))
        .T.contiguous()
        .view(torch.int16)
        .to(torch.int32)
        for x in (scales, zeros)
    )
    return (low & 0xFFFF) | (high << 16)


def choose(state: GroupedLinear, m: int, dense: bool = True) -> Config:
    """Return the configuration for M rows; ``dense``: whether torch may multiply."""
    from aiakq.kernels.triton import configs

    n, device = state.uncut_n or state.n, state.words.device
    chosen = configs.choose("grouped", device, state.bits, n, state.steps, m, dense=dense and not state.uncut_n)
    # With one scale per plane it is cheaper to apply it to the weights.
    return replace(chosen, scale_first=True) if state.group == state.plane else _fitting(state, chosen)


def _fitting(state: GroupedLinear, config: Config) -> Config:
    """Return ``config``; scales are applied first where planes with different ones are joined."""
    return replace(config, scale_first=True) if config.joined and state.group < state.step else config


def layout_for(state: GroupedLinear, m: int, config: Config) -> PackedLayout | None:
    """Return the layout that M rows need for the product with ``config``, or None for plain rows."""
    if config.dense or (state.perm is None and config.scale_first):
        return None
    stride = 0 if config.scale_first else max(1, -(-m // config.bm)) * config.bm
    return PackedLayout(state.perm, state.bits, state.plane, stride, state.group < state.step)


def pack_activation(x: Tensor, layout: PackedLayout) -> PackedActivation:
    """Convert x [M, K] to ``layout``."""
    from aiakq.kernels.triton import linear_kernel as grouped

    m, k = x.shape
    rows = x if layout.perm is None else torch.empty(m, k, dtype=x.dtype, device=x.device)
    sums = layout.sums_for(x)
    block = min(COLUMNS, block_for(k))
    grouped.arrange_kernel[(m, -(-k // block))](
        x, x if layout.perm is None else layout.perm, rows, x if sums is None else sums, x.stride(0), layout.stride,
        K=k, BLOCK=block, BITS=layout.bits, BKP=layout.plane, PERM=layout.perm is not None, SUMS=sums is not None,
        PER_PLANE=layout.per_plane, num_warps=warps_for(block),
    )  # fmt: skip
    return PackedActivation(rows, sums)


def run(x: LinearInput, state: GroupedLinear, config: Config | None = None) -> Tensor:
    """Multiply x [M, K], or x in the layout of ``state.input_layout(M)`` -> [M, N] of the same dtype."""
    from aiakq.kernels.triton import configs
    from aiakq.kernels.triton import linear_kernel as grouped

    packed = x if isinstance(x, PackedActivation) else None
    x = packed.rows if packed is not None else x
    assert isinstance(x, Tensor)
    m = x.shape[0]
    if m == 0:
        return x.new_empty(0, state.n)
    if x.stride(1) != 1:
        x = x.contiguous()
    chosen = choose(state, m) if config is None else _fitting(state, config)
    if chosen.dense:
        return dense(x, state)
    if packed is None:
        layout = layout_for(state, m, chosen)
        packed = PackedActivation(x, None) if layout is None else pack_activation(x, layout)
    rows, sums = packed.rows, x if packed.sums is None else packed.sums
    sums_stride = sums.stride(0)
    y = x.new_empty(m, state.n)
    split = min(chosen.split, state.steps)
    padded = state.grid.shape[1]
    grid = (-(-m // chosen.bm), -(-padded // chosen.bn), split)
    parts = y if split == 1 else torch.empty(split, m, state.n, dtype=torch.float32, device=x.device)
    counts = y if split == 1 else configs.counters(x.device, grid[0] * grid[1])
    grouped.grouped_kernel[grid](
        rows, sums, state.words, state.grid, state.factors, state.bias if state.bias is not None else x, y, parts,
        counts, rows.stride(0), sums_stride, y.stride(0), m, state.n,
        N_PADDED=padded, STEPS=state.steps, GROUP=state.group, BITS=state.bits, BKP=state.plane,
        BN=chosen.bn, BM=chosen.bm, SPLIT=split, BIAS=state.bias is not None,
        SCALE_FIRST=chosen.scale_first, JOINED=chosen.joined, PLAIN=chosen.plain, STAGES=chosen.stages,
        num_warps=chosen.warps,
    )  # fmt: skip
    return y


def dense(x: Tensor, state: GroupedLinear) -> Tensor:
    """``run`` for many rows: dequantize the weights to memory and multiply with torch. x [M, K] -> [M, N]."""
    from aiakq.kernels.triton import configs

    weights = configs.scratch(x, state.n * state.k).view(state.n, state.k)
    dequantize(state, weights)
    if state.perm is not None:
        x = x.index_select(1, state.perm)
    return torch.nn.functional.linear(x, weights, state.bias)


def dequantize(state: GroupedLinear, out: Tensor, plain: bool = False) -> None:
    """Dequantize the weights [N, K] into ``out`` in its dtype, inputs in the order of the layout."""
    from aiakq.kernels.triton.linear_kernel import dequantize_kernel

    tiles = state.grid.shape[1] // TILE
    dequantize_kernel[(tiles, state.steps)](
        state.words, state.grid, state.factors, out, state.n, N_PADDED=state.grid.shape[1], STEPS=state.steps,
        GROUP=state.group, BITS=state.bits, BKP=state.plane, PLAIN=plain, num_warps=4,
    )  # fmt: skip
