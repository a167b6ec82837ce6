"""Layers whose codes are 8-bit floats: every implementation against float64, on every instruction set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.block_floats import round_inputs
from aiakq.kernels.ops.float8 import decode
from aiakq.kernels.ops.linear import IMPLEMENTATIONS, LinearLayer
from aiakq.kernels.ops.parallel import ROW
from aiakq.kernels.ops.row_parallel import RowParallelOps
from aiakq.kernels.ops.sharded import ShardedOps
from aiakq.kernels.types import InputRounding, QWeight

TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
#: (M, N, K, G): blocks, sizes that divide nothing, rows with one scale, groups smaller than a block of the kernel.
SHAPES = [(1, 64, 256, 128), (7, 33, 300, 128), (5, 17, 130, 130), (9, 40, 72, 16), (3, 1, 33, 8), (2, 96, 1, 1)]
ROUNDINGS = {
    "rows": InputRounding(),
    "groups": InputRounding(128),
    "odd groups": InputRounding(20),
    "powers": InputRounding(64, powers_of_two=True),
    "bound": InputRounding(bound=0.7, min_scale=1 / (448 * 512)),
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def make(n: int, k: int, group: int, code_type: torch.dtype, scheme: str = "fp8a16", bias: bool = True) -> QWeight:
    """Every finite code occurs, those below the smallest normal number, too."""
    generator = torch.Generator().manual_seed(n * 1009 + k)
    codes = torch.randint(0, 256, (n, k), generator=generator).to(torch.uint8)
    finite = (codes & 0x7F) < (0x7F if code_type == torch.float8_e4m3fn else 0x7C)
    groups = -(-k // group)
    return QWeight(
        scheme=scheme,
        codes=torch.where(finite, codes, codes & 0x83),
        scales=(torch.rand(n, groups, generator=generator) + 0.5) * torch.randn(n, groups, generator=generator).sign(),
        bias=torch.randn(n, generator=generator) if bias else None,
        group_size=group,
        code_type=code_type,
    )


def value(code: int, exponent_bits: int, bias: int) -> float:
    """The definition of a binary floating-point number of 8 bits."""
    fraction_bits = 7 - exponent_bits
    exponent, fraction = (code & 0x7F) >> fraction_bits, code & ((1 << fraction_bits) - 1)
    size = fraction / 2**fraction_bits + (exponent > 0)
    return (-1 if code & 0x80 else 1) * size * 2.0 ** (max(exponent, 1) - bias)


def truth(weight: QWeight) -> Tensor:
    table = [value(code, *((4, 7) if weight.code_type == TYPES[0] else (5, 15))) for code in range(256)]
    numbers = torch.tensor(table, dtype=torch.float64)[weight.codes.long()]
    return numbers * weight.scales.double().repeat_interleave(weight.group_size, 1)[:, : weight.k]


def rounded(x: Tensor, weight: QWeight) -> Tensor:
    """Round group by group, as the definition says: independent of the code under test."""
    rounding, x = weight.rounding, x.float()
    parts = []
    for part in x.split(rounding.group or x.shape[1], dim=1):
        scale = part.abs().amax(1, keepdim=True).clamp(max=rounding.bound) / 448
        scale = scale.clamp(min=rounding.min_scale)
        if rounding.powers_of_two:
            scale = torch.pow(2.0, torch.ceil(torch.log2(scale.double()))).float()
        scale = torch.where(scale == 0, torch.ones(1), scale)
        if weight.input_scale is not None:
            scale = weight.input_scale.reshape(1, 1)
        parts.append((part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(parts, 1)


@pytest.fixture(params=["reference", "dequantized", "portable", "avx2", "avx512", "vnni"])
def prepare(request):
    """Prepares a layer with one implementation, or with the native one on one instruction set."""
    name = request.param
    if name in ("reference", "dequantized"):
        yield IMPLEMENTATIONS.load(name).prepare
        return
    if reason := library.unavailable():
        pytest.skip(reason)
    native = library.load_library()
    before = native.isa
    try:
        native.use_isa(name)
    except OSError as problem:
        pytest.skip(str(problem))
    yield IMPLEMENTATIONS.load("cpu").prepare
    native.use_isa(before)


def layer_of(prepare, weight: QWeight, dtype: torch.dtype) -> LinearLayer:
    return prepare(weight, weight.problem(dtype, "cpu"))


def away(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).nan_to_num(float("inf")).item()


def test_every_code_has_the_value_of_its_definition():
    for code_type, bits, bias in zip(TYPES, (4, 5), (7, 15), strict=True):
        limit = 0x7F if bits == 4 else 0x7C
        codes = [code for code in range(256) if code & 0x7F < limit]
        decoded = decode(torch.tensor([codes], dtype=torch.uint8), code_type)[0]
        assert decoded.tolist() == [value(code, bits, bias) for code in codes]


@pytest.mark.parametrize("code_type", TYPES, ids=["e4m3", "e5m2"])
def test_products_match_the_dequantized_weight(prepare, code_type):
    for m, n, k, group in SHAPES:
        weight = make(n, k, group, code_type)
        for scales in (weight.scales, weight.scales.half(), weight.scales.bfloat16()):
            weight = replace(weight, scales=scales)
            for dtype, tolerance in TOLERANCE.items():
                if dtype == torch.float16 and code_type == TYPES[1]:
                    continue  # the largest e5m2 is 57344
                x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
                y = layer_of(prepare, weight, dtype)(x)
                assert y.shape == (m, n) and y.dtype == dtype
                wanted = x.double() @ truth(weight).T + weight.bias.double()
                scale = (x.double().abs() @ truth(weight).abs().T).norm() / wanted.norm()
                assert away(y, wanted) < tolerance * max(1, scale.item()), (m, n, k, group, dtype)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_activations_are_rounded_as_defined(prepare, rounding):
    for m, n, k, group in SHAPES:
        weight = replace(make(n, k, group, TYPES[0], "fp8a8", bias=False), rounding=ROUNDINGS[rounding])
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)) * torch.logspace(-6, 1, k)
        x[:, k // 2] = 0
        wanted = rounded(x, weight) @ truth(weight).T
        y = layer_of(prepare, weight, torch.float32)(x)
        scale = (x.double().abs() @ truth(weight).abs().T).norm() / wanted.norm().clamp_min(1e-30)
        assert away(y, wanted) < 2e-6 * max(1, scale.item()) or not wanted.any(), (m, n, k, group)


@pytest.mark.parametrize("scale", [0.001, 0.03, 8.0])
def test_activations_are_rounded_with_a_stored_scale(prepare, scale):
    """Those out of range are cut off."""
    weight = replace(make(17, 130, 130, TYPES[0], "fp8a8", bias=False), input_scale=torch.tensor(scale))
    x = torch.randn(5, 130, generator=torch.Generator().manual_seed(1))
    assert away(layer_of(prepare, weight, torch.float32)(x), rounded(x, weight) @ truth(weight).T) < 4e-6


def test_ties_and_the_smallest_numbers_are_rounded_as_torch_rounds_them(prepare):
    """All sums of two neighbors, halved, and their neighbors; multiplied by an identity."""
    table = sorted({value(code, 4, 7) for code in range(256) if code & 0x7F < 0x7F})
    numbers = torch.tensor(table)
    ties = (numbers[1:] + numbers[:-1]) / 2
    up, down = (torch.nextafter(ties, torch.tensor(limit)) for limit in (float("inf"), -float("inf")))
    x = torch.cat([numbers, ties, up, down, torch.tensor([1e-6, -1e-6, 500.0, -500.0])])
    weight = QWeight(
        scheme="fp8a8",
        codes=torch.full((1, 1), 0x38, dtype=torch.uint8),
        scales=torch.ones(1, 1),
        code_type=TYPES[0],
        input_scale=torch.tensor(1.0),
    )
    y = layer_of(prepare, weight, torch.float32)(x[:, None])[:, 0]
    assert torch.equal(y, x.clamp(-448, 448).to(TYPES[0]).float())


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_rows_without_anything_give_zeros_and_rows_with_nan_give_nan(prepare, static):
    weight = replace(make(8, 64, 32, TYPES[0], "fp8a8", bias=False), rounding=InputRounding(32))
    weight.input_scale = torch.tensor(0.1) if static else None
    x = torch.zeros(3, 64)
    x[1, 5] = float("nan")
    y = layer_of(prepare, weight, torch.float32)(x)
    assert not y[[0, 2]].any() and y[1].isnan().all()


@pytest.mark.parametrize("scheme", ["fp8a16", "fp8a8"])
def test_a_row_does_not_depend_on_the_others(scheme):
    if reason := library.unavailable():
        pytest.skip(reason)
    for _, n, k, group in SHAPES:
        weight = replace(make(n, k, group, TYPES[0], scheme), rounding=InputRounding(32 if scheme == "fp8a8" else 0))
        layer = IMPLEMENTATIONS.load("cpu").prepare(weight, weight.problem(torch.float32, "cpu"))
        x = torch.randn(37, k, generator=torch.Generator().manual_seed(k))
        whole = layer(x)
        for rows in (slice(0, 1), slice(3, 5), slice(30, 37), slice(8, 24)):
            assert torch.equal(layer(x[rows].clone()), whole[rows])


class Part:
    """One rank by itself, which keeps its part of every sum."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2

    def gather(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        whole = torch.zeros(len(x), bounds[-1], dtype=x.dtype)
        whole[:, bounds[self.rank] : bounds[self.rank + 1]] = x
        return whole

    def sum(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(("k", "gathered"), [(512, False), (384, True), (320, True)])
def test_ranks_have_whole_groups_of_inputs_or_gather(k, gathered):
    """Blocks of 128 x 128, with 200 outputs: a shard ends within a block of outputs, never within one of inputs."""
    cpu = torch.device("cpu")
    weight = make(200, k, 128, TYPES[0], "fp8a8")
    weight = replace(weight, rounding=InputRounding(128), scales=weight.scales[:1].repeat_interleave(200, 0))
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(0))
    whole = Ops(cpu, torch.float32).linear(weight)(x)
    for kind in (RowParallelOps, ShardedOps):
        parts = [kind(Ops(cpu, torch.float32), Part(rank)).linear(weight, role=ROW) for rank in range(2)]
        summed = kind is RowParallelOps and not gathered
        assert all((part.inputs is not None) == summed for part in parts)
        assert (
            kind is ShardedOps
            or (parts[0].reason == "its groups of 128 inputs with one scale straddle shares") == gathered
        )
        outputs = [part(x if part.inputs is None else x[:, part.inputs].contiguous()) for part in parts]
        assert away(sum(outputs), whole.double()) < 2e-6
        assert summed or torch.equal(sum(outputs), whole)


def test_inputs_of_one_scale_are_not_divided():
    weight = replace(make(8, 256, 64, TYPES[0], "fp8a8"), rounding=InputRounding(128))
    part = weight.with_inputs(128, 256)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(truth(part), truth(weight)[:, 128:])
    assert torch.equal(round_inputs(x, None, weight.rounding)[:, 128:], round_inputs(x[:, 128:], None, part.rounding))
    with pytest.raises(AssertionError):
        weight.with_inputs(64, 256)


@pytest.mark.parametrize("code_type", TYPES, ids=str)
def test_rows_of_any_magnitude_have_the_same_relative_error(code_type):
    """Natively, a row is divided by a power of two, and alone it is multiplied with codes decoded in another way."""
    weight = make(40, 256, 64, code_type, bias=False)
    layer = Ops(torch.device("cpu"), torch.float32).linear(weight)
    powers = torch.tensor([100.0, 60.0, 0.0, -60.0, -90.0])
    one = torch.randn(256, generator=torch.Generator().manual_seed(2))
    x = one * 2 ** powers[:, None]
    y = layer(x)
    assert torch.equal(y, y[2] * 2 ** powers[:, None])
    assert torch.equal(y, torch.cat([layer(row[None]) for row in x]))
    wanted = one.double() @ truth(weight).T
    assert (y[2] - wanted).norm() < 2e-6 * wanted.norm()
    assert not layer(torch.zeros(3, 256)).any()
