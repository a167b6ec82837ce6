"""Launcher of linear_floats_kernel.py: weights that are floats of 8 or 4 bits, 16-bit activations.

Activations that the scheme rounds (fp8a8) are rounded as the reference does it, and multiplied in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiakq.kernels import triton
from aiakq.kernels.ops.linear import LinearLayer, RoundedInputs
from aiakq.kernels.triton.float_scales import FLOAT32, store
from aiakq.kernels.triton.linear import TILE, WIDEST, inputs_per_plane
from aiakq.kernels.types import LinearInput, LinearProblem, QWeight

if TYPE_CHECKING:
    from aiakq.kernels.triton.configs import Config

#: Schemes -> bits of a code.
BITS = {"fp8a16": 8, "fp8a8": 8, "lut4a16": 4}
#: Bits of a code -> the family of kernels in self_test.py.
FAMILIES = {8: "float linear", 4: "4-bit float linear"}
#: Bits of the mantissa of each type of codes; those of 4 bits, which have none, are e2m1.
MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2, None: 1}


def supports(problem: LinearProblem) -> str | None:
    """Return None, or why not."""
    return fits(problem) or triton.unavailable_reason(FAMILIES[BITS[problem.scheme]])


def fits(problem: LinearProblem) -> str | None:
    """Return None if the layout can hold such a weight, or why not."""
    if problem.scheme not in BITS:
        return f"it has no {problem.scheme}"
    if problem.table not in (None, "e2m1"):
        return "its 4-bit codes are e2m1, not of another table"
    if problem.dtype not in triton.DTYPES:
        return f"activations are float16 or bfloat16, not {problem.dtype}"
    if problem.has_zeros or problem.has_perm:
        return "floats have no zero points and no order"
    if inputs_per_plane(problem.k, problem.group_size, BITS[problem.scheme]) is None:
        return f"groups of {problem.group_size} of {problem.k} inputs do not fit its steps"
    return None


@dataclass(eq=False)
class FloatCodesProduct(LinearLayer):
    """A weight in the layout of linear_floats_kernel.py.

    words     [N padded / 64, steps, 64, plane] int16.
    scales    [groups, N padded] float32 or, as ``stored`` says, four groups in int32 [ceil(groups / 4), N padded]
              (float_scales.py); [1, N padded] of any value with one group.
    factors   [N padded] float32.
    mantissa  bits of a code's mantissa.
    plane     inputs per plane and step.
    uncut_n   see LinearProblem.
    """

    words: Tensor
    scales: Tensor
    factors: Tensor
    bias: Tensor | None
    n: int
    k: int
    group: int
    bits: int
    mantissa: int
    stored: int
    plane: int
    uncut_n: int = 0

    @property
    def kind(self) -> tuple[int, ...]:
        """What weights have in common that one launch multiplies with."""
        return self.n, self.k, self.group, self.bits, self.mantissa, self.stored

    @property
    def step(self) -> int:
        """Number of inputs per step."""
        return self.plane * (16 // self.bits)

    @property
    def steps(self) -> int:
        """Number of steps over all inputs."""
        return self.k // self.step

    def __call__(self, x: LinearInput) -> Tensor:
        """x [M, K] -> [M, N] of the same dtype."""
        assert isinstance(x, Tensor)
        return run(x, self)


def prepare(weight: QWeight, problem: LinearProblem) -> LinearLayer:
    """Pack ``weight`` (not modified) into the layout."""
    layer = pack(weight, problem)
    return RoundedInputs(layer, weight.input_scale, weight.rounding) if weight.scheme == "fp8a8" else layer


def pack(weight: QWeight, problem: LinearProblem) -> FloatCodesProduct:
    """Return the product with ``weight``, without rounding of activations."""
    bits = BITS[weight.scheme]
    plane = inputs_per_plane(weight.k, weight.group_size, bits)
    assert plane is not None
    padding = -weight.n % WIDEST
    scales, factors, stored = weight.scales.float(), torch.ones_like(weight.scales[:, 0], dtype=torch.float32), FLOAT32
    if weight.group_size == weight.k:
        # The scale of a single group takes the place of the factors of all groups.
        factors = scales[:, 0]
    elif bits == 4:
        scales, factors, stored = store(weight.scales, weight.codes, weight.group_size)
    scales = torch.nn.functional.pad(scales, (0, 0, 0, padding)).T.contiguous()
    factors = torch.nn.functional.pad(factors, (0, padding))
    bias = None if weight.bias is None else weight.bias.to(problem.dtype).contiguous()
    return FloatCodesProduct(
        _words(weight.codes, bits, plane), scales, factors, bias, weight.n, weight.k, weight.group_size, bits,
        MANTISSA[weight.code_type], stored, plane, problem.uncut_n,
    )  # fmt: skip


def _words(codes: Tensor, bits: int, plane: int) -> Tensor:
    """Pack codes [N, K] uint8 into [N padded / 64, steps, 64, plane] int16; see linear_kernel.py."""
    planes, (n, k) = 16 // bits, codes.shape
    codes = torch.nn.functional.pad(codes, (0, 0, 0, -n % WIDEST))
    tiles = codes.view(-1, TILE, k // (plane * planes), planes, plane).to(torch.int32)
    words = torch.zeros_like(tiles[:, :, :, 0])
    for number in range(planes):
        words |= tiles[:, :, :, number] << (number * bits)
    # Conversion to int16 keeps the lower bits; torch wraps around.
    return words.to(torch.int16).transpose(1, 2).contiguous()


def choose(state: FloatCodesProduct, m: int, dense: bool = True) -> Config:
    """Return the configuration for M rows; ``dense``: whether torch may multiply."""
    from aiakq.kernels.triton import configs

    n, device = state.uncut_n or state.n, state.words.device
    chosen = configs.choose(
        "float_codes", device, state.bits, n, state.steps, m, dense=dense and not state.uncut_n
    )  # fmt: skip
    return _fitting(state, chosen)


def _fitting(state: FloatCodesProduct, config: Config) -> Config:
    """Return ``config`` with what the weight allows: only scales of 8 bits are applied to weights without rounding, and
    only planes with these, or with the same scale, are joined.
    """
    scale_first = config.scale_first and state.stored != FLOAT32 and state.group < state.k
    return replace(config, scale_first=scale_first, joined=config.joined and (scale_first or state.group >= state.step))


def constants(state: FloatCodesProduct, config: Config, dtype: torch.dtype) -> dict[str, int | bool]:
    """Return the constants that describe weights and their decoding for activations of ``dtype``."""
    return {
        "N_PADDED": state.factors.shape[-1], "STEPS": state.steps, "GROUP": state.group, "BITS": state.bits,
        "MANTISSA": state.mantissa, "SCALES": state.stored, "BKP": state.plane, "SCALE_FIRST": config.scale_first,
        "JOINED": config.joined, "HARDWARE": is_converted(state, dtype, config.plain), "PLAIN": config.plain,
    }  # fmt: skip


def is_converted(state: FloatCodesProduct, dtype: torch.dtype, plain: bool) -> bool:
    """Whether the GPU converts codes itself."""
    from aiakq.kernels.triton import configs

    capability = configs.gpu(state.words.device).capability
    return state.bits == 8 and dtype == torch.float16 and not plain and capability >= 89


def run(x: Tensor, state: FloatCodesProduct, config: Config | None = None) -> Tensor:
    """Multiply x [M, K] -> [M, N] of the same dtype."""
    from aiakq.kernels.triton import configs
    from aiakq.kernels.triton.linear_floats_kernel import float_codes_kernel

    m = x.shape[0]
    if m == 0:
        return x.new_empty(0, state.n)
    if x.stride(1) != 1:
        x = x.contiguous()
    chosen = choose(state, m) if config is None else _fitting(state, config)
    if chosen.dense:
        return dense(x, state)
    y = x.new_empty(m, state.n)
    split = min(chosen.split, state.steps)
    padded = len(state.factors)
    grid = (-(-m // chosen.bm), -(-padded // chosen.bn), split)
    parts = y if split == 1 else torch.empty(split, m, state.n, dtype=torch.float32, device=x.device)
    counts = y if split == 1 else configs.counters(x.device, grid[0] * grid[1])
    float_codes_kernel[grid](
        x, state.words, state.scales, state.factors, x if state.bias is None else state.bias, y, parts, counts,
        x.stride(0), y.stride(0), m, state.n,
        BN=chosen.bn, BM=chosen.bm, SPLIT=split, STAGES=chosen.stages, BIAS=state.bias is not None,
        **constants(state, chosen, x.dtype), num_warps=chosen.warps,
    )  # fmt: skip
    return y


def dense(x: Tensor, state: FloatCodesProduct) -> Tensor:
    """``run`` for many rows: decode the weights to memory and multiply with torch. x [M, K] -> [M, N]."""
    from aiakq.kernels.triton import configs

    weights = configs.scratch(x, state.n * state.k).view(state.n, state.k)
    decode(state, weights)
    return torch.nn.functional.linear(x, weights, state.bias)


def decode(state: FloatCodesProduct, out: Tensor, plain: bool = False) -> None:
    """Decode the weights [N, K] into ``out`` in its dtype, rounded once."""
    from aiakq.kernels.triton.linear_floats_kernel import decode_codes_kernel

    padded = len(state.factors)
    decode_codes_kernel[(padded // TILE, state.steps)](
        state.words, state.scales, state.factors, out, state.n, N_PADDED=padded, STEPS=state.steps, GROUP=state.group,
        BITS=state.bits, MANTISSA=state.mantissa, SCALES=state.stored, BKP=state.plane,
        HARDWARE=is_converted(state, out.dtype, plain), PLAIN=plain, num_warps=4,
    )  # fmt: skip
