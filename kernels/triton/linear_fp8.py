"""Launcher of linear_fp8_kernel.py: e4m3 weights, activations rounded to e4m3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.linear import LinearLayer
from aiakq.kernels.triton.layouts import COLUMNS, Float8Layout, block_for, warps_for
from aiakq.kernels.triton.linear_int8 import step_of
from aiakq.kernels.types import InputRounding, LinearInput, LinearProblem, QuantizedActivation, QWeight

if TYPE_CHECKING:
    from aiakq.kernels.triton.configs import Config

#: The family of kernels in self_test.py.
FAMILY = "fp8 linear"
#: Inputs that share a scale, of weights or of activations, unless all do; and inputs per inner step then.
GROUP = 128
#: Outputs are padded to multiples of this, the maximum per program.
WIDEST = 128


def supports(problem: LinearProblem) -> str | None:
    """Return None, or why not."""
    return fits(problem) or triton.unavailable_reason(FAMILY)


def fits(problem: LinearProblem) -> str | None:
    """Return None if the layout can hold such a weight, or why not."""
    if problem.scheme != "fp8a8":
        return f"it has no {problem.scheme}"
    if problem.dtype not in (*triton.DTYPES, torch.float32):
        return f"activations are float32, float16 or bfloat16, not {problem.dtype}"
    if problem.e5m2:
        return "weights are e4m3, not e5m2"
    if problem.has_zeros or problem.has_perm:
        return "floats have no zero points and no order"
    for what, group in (("weights", problem.group_size), ("activations", problem.rounding.group)):
        if group not in (0, GROUP, problem.k):
            return f"{what} have a scale for all inputs or {GROUP} of them, not for {group}"
        if group == GROUP and problem.k % GROUP:
            return f"{problem.k} inputs are no multiple of {GROUP}"
    if problem.k % 32:
        return "inputs come in multiples of 32"
    return None


@dataclass(eq=False)
class Fp8Linear(LinearLayer):
    """e4m3 weights, multiplied with activations that are rounded to e4m3.

    weights      [N padded, K] float8_e4m3fn.
    scales       [groups, N padded] float32: per output, or per output and GROUP inputs.
    input_scale  [1] float32, the stored scale of activations, or None: they are computed as ``rounding`` says.
    common       outputs, from a multiple of this many on, that have the same scales.
    uncut_n      see LinearProblem.
    """

    weights: Tensor
    scales: Tensor
    input_scale: Tensor | None
    rounding: InputRounding
    bias: Tensor | None
    n: int
    k: int
    common: int
    uncut_n: int = 0

    @property
    def step(self) -> int:
        """Number of inputs per inner step."""
        return step_of(self.k)

    @property
    def kind(self) -> tuple[int, int, int, InputRounding]:
        """What weights have in common that one launch multiplies with."""
        return self.n, self.k, self.scales.shape[-2], self.rounding

    @property
    def layout(self) -> Float8Layout:
        """The layout of its input."""
        group = self.rounding.group if self.rounding.group < self.k else 0
        return Float8Layout(self.input_scale, 0 if self.input_scale is not None else group, self.rounding)

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K], or in the layout of ``input_layout(M)`` -> [M, N] of the same dtype."""
        if not isinstance(x, QuantizedActivation):
            assert isinstance(x, Tensor)
            x = quantize(x, self.layout)
        return multiply(x, self)

    def input_layout(self, m: int) -> Float8Layout:
        """Return the layout that a norm or an activation function can write for this layer."""
        return self.layout


def prepare(weight: QWeight, problem: LinearProblem) -> Fp8Linear:
    """Pack ``weight`` (not modified) into the layout."""
    padding = -weight.n % WIDEST
    codes = torch.nn.functional.pad(weight.codes, (0, 0, 0, padding)).contiguous().view(torch.float8_e4m3fn)
    scales = torch.nn.functional.pad(weight.scales.float(), (0, 0, 0, padding), mode="constant")
    runs = scales[: weight.n]
    common = next((size for size in (WIDEST, WIDEST // 2) if _is_common(runs, size)), 1)
    given = None if weight.input_scale is None else weight.input_scale.float().reshape(1).contiguous()
    bias = None if weight.bias is None else weight.bias.to(problem.dtype).contiguous()
    return Fp8Linear(
        codes, scales.T.contiguous(), given, weight.rounding, bias, weight.n, weight.k, common, problem.uncut_n
    )


def _is_common(scales: Tensor, size: int) -> bool:
    """Whether every ``size`` outputs of scales [N, groups] have the same ones, the last ones too if they are fewer."""
    runs = torch.arange(len(scales), device=scales.device) // size * size
    return bool((scales == scales[runs]).all())


def quantize(x: Tensor, layout: Float8Layout) -> QuantizedActivation:
    """Round x [M, K] to ``layout``."""
    from aiakq.kernels.triton.linear_fp8_kernel import quantize_e4m3_kernel

    if x.stride(1) != 1:
        x = x.contiguous()
    m, k = x.shape
    out, rounding = layout.output(x), layout.rounding
    block = min(COLUMNS, block_for(k)) if layout.group else block_for(k)
    if m:
        quantize_e4m3_kernel[(m, -(-k // block))](
            x, *out.pointers, x.stride(0), m, rounding.bound, rounding.min_scale,
            K=k, BLOCK=block, GIVEN=layout.input_scale is not None, GROUP=layout.group, POWERS=rounding.powers_of_two,
            num_warps=warps_for(block),
        )  # fmt: skip
    assert isinstance(out.activation, QuantizedActivation)
    return out.activation


def multiply(x: QuantizedActivation, state: Fp8Linear, config: Config | None = None) -> Tensor:
    """Multiply x [M, K], e4m3 with scales [1 or groups, M], by the weight -> [M, N] of ``x.dtype``."""
    from aiakq.kernels.triton import configs
    from aiakq.kernels.triton.linear_fp8_kernel import fp8_kernel

    m, k = x.codes.shape
    device, steps = x.codes.device, k // state.step
    y = torch.empty(m, state.n, dtype=x.dtype, device=device)
    if m == 0:
        return y
    c = config or choose(state, m)
    split = min(c.split, steps)
    grid = (-(-m // c.bm), -(-state.n // c.bn), split)
    parts = y if split == 1 else torch.empty(split, m, state.n, dtype=torch.float32, device=device)
    counts = y if split == 1 else configs.counters(device, grid[0] * grid[1])
    fp8_kernel[grid](
        x.codes, x.scales, state.weights, state.scales, y if state.bias is None else state.bias, y, parts, counts,
        y.stride(0), m, state.n,
        SPLIT=split, BIAS=state.bias is not None, **constants(state, c), num_warps=c.warps,
    )  # fmt: skip
    return y


def choose(state: Fp8Linear, m: int) -> Config:
    """Return the configuration for M rows."""
    from aiakq.kernels.triton import configs

    return configs.choose("fp8", state.weights.device, 8, state.uncut_n or state.n, state.k // state.step, m)


def constants(state: Fp8Linear, config: Config) -> dict[str, int | bool]:
    """Return the constants of kernels that describe the weights, their scales and tiles."""
    return {
        "K": state.k, "N_PADDED": state.weights.shape[-2], "BN": config.bn, "BM": config.bm, "BK": state.step,
        "STAGES": config.stages, "WEIGHTS_LEFT": config.weights_left, "X_GROUPS": state.layout.group > 0,
        "W_GROUPS": state.scales.shape[-2] > 1, "COMMON": state.common >= config.bn,
    }  # fmt: skip
