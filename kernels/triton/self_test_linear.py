"""The families of linear layers of the self-test of a GPU; see self_test.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiakq.kernels.ops import REGISTRIES
from aiakq.kernels.ops.block_floats import round_inputs
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import ActivationProblem, InputRounding, NormProblem, QWeight

if TYPE_CHECKING:
    from aiakq.kernels.triton.layouts import Float8Layout


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative RMS error of ``actual`` [...] against ``expected`` [...], in float64."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def weight_of(scheme: str, bits: int, n: int, k: int, group: int, device: torch.device) -> QWeight:
    """Return random integers, or 4-bit floats, [N, K] of ``scheme``."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(1, 2**bits, (n, k), generator=generator).to(torch.uint8)
    if scheme == "lut4a16":
        powers = torch.exp2(torch.randint(-9, -4, (n, k // group), generator=generator).float())
        return QWeight(scheme, codes, powers, group_size=group, table=torch.tensor(TABLES["e2m1"])).to(device)
    scales = (torch.rand(n, k // group, generator=generator) - 0.5).half() / 32
    return QWeight(scheme, codes, scales if bits == 4 else scales.float(), group_size=group).to(device)


def weight_only(device: torch.device) -> float:
    """Check 4-bit weights: one row, split inputs, many rows, and dequantized to memory; in small groups many rows."""
    from aiakq.kernels.triton.configs import Config

    linear = REGISTRIES["linear"].load("triton")
    many = ((40, None), (200, None))
    worst = 0.0
    for group, sizes in ((128, ((3, None), (16, Config(64, 16, 2, 3, 4)), *many, (1000, None))), (32, many)):
        weight = weight_of("w4a16", 4, 192, 1024, group, device)
        whole = (weight.codes.float() - 8) * weight.scales.float().repeat_interleave(group, dim=1)
        for dtype in (torch.float16, torch.bfloat16):
            state = linear.prepare(weight, weight.problem(dtype, device.type))
            for m, config in sizes:
                x = torch.randn(m, 1024, device=device, dtype=dtype)
                worst = max(worst, relative_error(linear.run(x, state, config), x.float() @ whole.T))
    return worst


def floats8(device: torch.device) -> float:
    """Check 8-bit floats with scales per output and in groups."""
    made = []
    for code_type, group in ((torch.float8_e4m3fn, 128), (torch.float8_e4m3fn, 512), (torch.float8_e5m2, 512)):
        generator = torch.Generator().manual_seed(0)
        codes = torch.randn(192, 512, generator=generator).to(code_type).view(torch.uint8)
        scales = (torch.rand(192, 512 // group, generator=generator) + 0.5) / 32
        made.append(QWeight("fp8a16", codes, scales, group_size=group, code_type=code_type))
    return _floats(made, device)


def floats4(device: torch.device) -> float:
    """Check 4-bit floats with powers of two (MXFP4) and with e4m3 numbers (NVFP4) as scales."""
    made = []
    for group, k in ((32, 512), (32, 448), (16, 512)):
        weight = weight_of("lut4a16", 4, 192, k, group, torch.device("cpu"))
        if group == 16:
            # As many numbers as e4m3 has, in units of 1 / 700.
            numbers = (weight.scales * 500 + torch.rand(weight.scales.shape)).to(torch.float8_e4m3fn)
            weight.scales = numbers.float() / 700
        made.append(weight)
    return _floats(made, device)


def _floats(weights: list[QWeight], device: torch.device) -> float:
    """Check few rows, split inputs, many rows, and weights that are decoded to memory."""
    from aiakq.kernels.triton.configs import Config

    linear_floats = REGISTRIES["linear"].load("triton-floats")
    worst = 0.0
    for weight in (each.to(device) for each in weights):
        whole = dequantize(weight)
        for dtype in (torch.float16, torch.bfloat16):
            state = linear_floats.pack(weight, weight.problem(dtype, device.type))
            for m, config in ((3, None), (16, Config(64, 16, 2, 3, 2)), (40, None), (200, None), (1000, None)):
                x = torch.randn(m, weight.k, device=device, dtype=dtype)
                worst = max(worst, relative_error(linear_floats.run(x, state, config), x.float() @ whole.T))
    return worst


def fp8_of(n: int, k: int, group: int, rounding: InputRounding, device: torch.device) -> QWeight:
    """Return random e4m3 weights [N, K] with blocks of 128 x 128, or with a scale per output if ``group`` is k."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(n, k // group, generator=generator) + 0.5) / 32
    if group < k:
        scales = scales[torch.arange(n) // 128 * 128]
    return QWeight(
        "fp8a8", codes, scales, group_size=group, code_type=torch.float8_e4m3fn, rounding=rounding
    ).to(device)  # fmt: skip


def fp8(device: torch.device) -> float:
    """Check e4m3 weights and activations: scales per row and in blocks, one row, split inputs, and many rows."""
    from aiakq.kernels.triton.configs import Config

    linear_fp8 = REGISTRIES["linear"].load("triton-fp8")
    worst = 0.0
    for group, rounding in ((1024, InputRounding()), (128, InputRounding(128)), (128, InputRounding(128, True))):
        weight = fp8_of(200, 1024, group, rounding, device)
        whole = dequantize(weight)
        state = linear_fp8.prepare(weight, weight.problem(torch.float16, device.type))
        split = Config(64, 16, 4, 3, 2, weights_left=True)
        for m, config in ((3, None), (16, split), (40, None), (200, None), (300, None)):
            x = torch.randn(m, 1024, device=device, dtype=torch.float16)
            exact = round_inputs(x, None, rounding) @ whole.T
            y = linear_fp8.multiply(linear_fp8.quantize(x, state.layout), state, config)
            worst = max(worst, relative_error(y, exact))
        worst = max(worst, _written_codes(state.layout, device))
    return worst


def _written_codes(layout: Float8Layout, device: torch.device) -> float:
    """Return the error of rows that a norm and an activation function round to ``layout``, less that of rounding."""
    x, up = (torch.randn(5, 1280, device=device, dtype=torch.float16) for _ in range(2))
    weight = torch.rand(1280, device=device, dtype=torch.float16) + 0.5
    norm = REGISTRIES["norm"].load("triton").prepare(weight, None, 1e-5, NormProblem("rms", 1280, x.dtype, device.type))
    silu = REGISTRIES["activation"].load("triton").prepare(ActivationProblem("silu", x.dtype, device.type))
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) * weight.float()
    gated = torch.nn.functional.silu(x.float()) * up.float()
    worst = 0.0
    for found, wanted in ((norm(x, None, layout), normed), (silu.gated(torch.cat((x, up), 1), layout), gated)):
        scales = found.scales.T.repeat_interleave(layout.group or 1280, dim=1)
        rounded = relative_error(round_inputs(wanted, None, layout.rounding), wanted)
        worst = max(worst, relative_error(found.codes.float() * scales, wanted) - rounded)
    return worst


def w8a8(device: torch.device) -> float:
    """Check 8-bit weights and activations."""
    linear_int8 = REGISTRIES["linear"].load("triton-w8a8")

    weight = weight_of("w8a8", 8, 200, 1024, 1024, device)
    state = linear_int8.prepare(weight, weight.problem(torch.float16, device.type))
    whole = (weight.codes.float() - 128) * weight.scales
    rows = [torch.randn(m, 1024, device=device, dtype=torch.float16) for m in (1, 40, 300)]
    return max(relative_error(state(x), x.float() @ whole.T) for x in rows)
