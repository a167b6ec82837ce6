"""e4m3 weights and activations: codes that are the reference's, products as exact as float32."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from aiakq.kernels.ops.block_floats import round_inputs
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.triton import configs, linear_fp8
from aiakq.kernels.triton.configs import Config
from aiakq.kernels.triton.layouts import Float8Layout
from aiakq.kernels.types import InputRounding, LinearProblem, QWeight

CONFIGS = {
    "weights_left": Config(64, 16, 4, 2, 1, weights_left=True),
    "weights_left_shared": Config(128, 16, 4, 2, 3, weights_left=True),
    "rows_left": Config(64, 64, 4, 2, 1),
    "rows_left_shared": Config(64, 64, 4, 2, 2),
}
ROUNDINGS = {
    "row": InputRounding(),
    "fbgemm": InputRounding(bound=1.5, min_scale=1 / (448 * 512)),
    "group": InputRounding(128),
    "powers": InputRounding(128, powers_of_two=True),
}


def weight(
    n: int, k: int, group: int, rounding: InputRounding, block: int = 1, given: float | None = None, bias: bool = False
) -> QWeight:
    draw = torch.Generator().manual_seed(n + k)
    codes = torch.randn(n, k, generator=draw).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(n, k // group, generator=draw) + 0.5) / 16
    return QWeight(
        "fp8a8",
        codes,
        scales[torch.arange(n) // block * block],
        bias=torch.randn(n, generator=draw) if bias else None,
        group_size=group,
        input_scale=None if given is None else torch.tensor(given),
        code_type=torch.float8_e4m3fn,
        rounding=rounding,
    )


def values(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)) * 3


def decoded(x, layout: Float8Layout) -> torch.Tensor:
    """Codes times scales, as float32."""
    scales = x.scales.T.repeat_interleave(layout.group or x.codes.shape[1], dim=1)
    return x.codes.float() * scales


@pytest.mark.parametrize("given", [None, 0.02])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_the_reference(dtype, rounding, given, device):
    x = values(7, 384).to(dtype)
    x[2], x[3], x[4] = 0, x[3] * 1e-8, x[4] * 1000
    x[5, :128] = 0
    scale = None if given is None else torch.tensor([given])
    layout = Float8Layout(
        None if scale is None else scale.to(device), 0 if given else ROUNDINGS[rounding].group, ROUNDINGS[rounding]
    )
    found = linear_fp8.quantize(x.to(device), layout)
    assert torch.equal(decoded(found, layout).cpu(), round_inputs(x, scale, ROUNDINGS[rounding]))


def test_every_tie_is_rounded_to_even(device):
    """Halfway between all neighbors, those numbers, and just beside them."""
    numbers = torch.arange(0x7F).to(torch.uint8).view(torch.float8_e4m3fn).double()
    halves = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(halves.float(), torch.tensor(end)).double() for end in (0.0, math.inf)]
    x = torch.cat([numbers, halves, *beside])
    x = torch.cat([x, -x, torch.tensor([500.0, -1e30])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 128)).float()[None]
    layout = Float8Layout(torch.ones(1, device=device), 0, InputRounding())
    found = linear_fp8.quantize(x.to(device), layout)
    assert torch.equal(found.codes.cpu().float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("k", "group", "rounding", "block"),
    [(160, 160, "row", 1), (256, 256, "group", 1), (256, 128, "row", 128), (384, 128, "group", 1),
     (256, 128, "powers", 64), (256, 128, "group", 128)],
)  # fmt: skip
def test_products_are_exact(k, group, rounding, block, name, device):
    """Scales of weights and of activations per row and in groups, which tiles have in common or do not."""
    w = weight(130, k, group, ROUNDINGS[rounding], block, bias=True)
    state = linear_fp8.prepare(w.to(device), w.problem(torch.float32, device.type))
    assert state.common == block
    for m in (1, 70):
        x = linear_fp8.quantize(values(m, k).to(device), state.layout)
        y = linear_fp8.multiply(x, state, CONFIGS[name]).cpu()
        wanted = decoded(x, state.layout).cpu().double() @ dequantize(w).double().T + w.bias
        assert (y - wanted).norm() < 1e-6 * wanted.norm()
    assert not configs.counters(device, 1).any()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_is_that_of_the_reference(dtype, rounding, device, close):
    for given in (None, 0.02):
        w = weight(130, 256, 128, ROUNDINGS[rounding], 128, given, bias=True)
        state = linear_fp8.prepare(w.to(device), w.problem(dtype, device.type))
        for m in (1, 70):
            x = values(m, 512).to(dtype)[:, 64:320]
            wanted = round_inputs(x, w.input_scale, w.rounding) @ dequantize(w).T + w.bias
            close(state(x.to(device)).cpu(), wanted)
    assert state(x[:0].to(device)).shape == (0, 130)


def test_what_is_not_finite_shows_in_its_row_only(device):
    for rounding, given in itertools.product((InputRounding(), InputRounding(128)), (None, 0.1)):
        x = values(3, 256)
        x[1, 5] = float("nan")
        w = weight(64, 256, 128, rounding, given=given)
        y = linear_fp8.prepare(w.to(device), w.problem(torch.float32, device.type))(x.to(device))
        assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scheme": "fp8a16"}, "fp8a16"),
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"e5m2": True}, "not e5m2"),
        ({"group_size": 64}, "weights have a scale for all inputs or 128"),
        ({"rounding": InputRounding(32)}, "activations have a scale for all inputs or 128"),
        ({"k": 192}, "no multiple of 128"),
        ({"k": 72, "group_size": 72}, "multiples of 32"),
        ({"has_zeros": True}, "no zero points"),
    ],
)
def test_unsupported_features_are_refused_by_name(changes, reason):
    asked = {"scheme": "fp8a8", "n": 64, "k": 256, "group_size": 128, "has_zeros": False, "has_perm": False} | {
        "has_bias": False, "static_input": False, "dtype": torch.float16, "device": "cuda"
    }  # fmt: skip
    assert linear_fp8.supports(LinearProblem(**asked)) is None
    assert reason in linear_fp8.supports(LinearProblem(**(asked | changes)))
