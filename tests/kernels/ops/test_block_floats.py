"""Inputs rounded to e2m1 and e4m3 with a scale per group, and layers whose weights are 4-bit floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.block_floats import power_of_two, round_e2m1, round_inputs
from aiakq.kernels.ops.parallel import ROW
from aiakq.kernels.ops.row_parallel import RowParallelOps
from aiakq.kernels.tables import TABLES
from aiakq.kernels.types import InputRounding, QWeight
from tests.fp4_files import VALUES, modelopt_nvfp4_rounded, mx_rounded, nvfp4_rounded

MXFP4 = InputRounding(32, elements="e2m1", scales="e8m0")
MXFP8 = InputRounding(32, scales="e8m0")
NVFP4 = InputRounding(16, elements="e2m1", scales="e4m3", reciprocal=True)
MODELOPT = InputRounding(16, min_scale=2**-9, elements="e2m1", scales="e4m3")


def make(n: int, k: int, group: int, rounding: InputRounding, scheme: str, unit: float | None = None) -> QWeight:
    generator = torch.Generator().manual_seed(n * 1009 + k)
    return QWeight(
        scheme=scheme,
        codes=torch.randint(0, 16, (n, k), generator=generator).to(torch.uint8),
        scales=2.0 ** torch.randint(-3, 3, (n, -(-k // group)), generator=generator),
        bias=torch.randn(n, generator=generator),
        group_size=group,
        table=torch.tensor(TABLES["e2m1"]),
        rounding=rounding,
        input_scale=None if unit is None else torch.tensor(unit),
    )


def truth(weight: QWeight) -> Tensor:
    assert weight.table is not None
    values = weight.table.double()[weight.codes.long()]
    return values * weight.scales.double().repeat_interleave(weight.group_size, 1)[:, : weight.k]


def activations(m: int, k: int) -> Tensor:
    """Of all magnitudes, and zeros."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)) * torch.logspace(-7, 3, k)
    x[:, k // 2 : k // 2 + 32] = 0
    return x


def test_numbers_are_rounded_to_the_nearest_with_ties_to_even():
    ties = (VALUES[1:] + VALUES[:-1]) / 2
    assert round_e2m1(VALUES).tolist() == VALUES.tolist() and round_e2m1(-VALUES).tolist() == (-VALUES).tolist()
    assert round_e2m1(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    for limit, neighbor in ((float("inf"), VALUES[1:]), (-float("inf"), VALUES[:-1])):
        assert torch.equal(round_e2m1(torch.nextafter(ties, torch.tensor(limit))), neighbor)


def test_every_exponent_is_a_power_of_two():
    exponents = torch.arange(255, dtype=torch.int32)
    assert power_of_two(exponents).tolist() == [2.0 ** (exponent - 127) for exponent in range(255)]


@pytest.mark.parametrize(
    ("rounding", "unit", "expected"),
    [
        (MXFP4, None, lambda x: mx_rounded(x, 4)),
        (MXFP8, None, lambda x: mx_rounded(x, 8)),
        (NVFP4, 3.7, lambda x: nvfp4_rounded(x, 3.7)),
        (NVFP4, 0.01, lambda x: nvfp4_rounded(x, 0.01)),
        (MODELOPT, 0.27, lambda x: modelopt_nvfp4_rounded(x, 0.27)),
        (MODELOPT, 1e-4, lambda x: modelopt_nvfp4_rounded(x, 1e-4)),
        (InputRounding(32, powers_of_two=True), None, lambda x: mx_rounded(x, 8, up=True)),
    ],
    ids=["mxfp4", "mxfp8", "nvfp4", "nvfp4-cut-off", "modelopt", "modelopt-cut-off", "modelopt-mxfp8"],
)
def test_activations_are_rounded_as_publishers_round_them(rounding, unit, expected):
    x = activations(9, 192)
    assert torch.equal(round_inputs(x, None if unit is None else torch.tensor(unit), rounding), expected(x))


@pytest.mark.parametrize("rounding", [MXFP4, MXFP8, NVFP4], ids=["mxfp4", "mxfp8", "nvfp4"])
def test_rows_without_anything_give_zeros_and_rows_with_nan_give_nan(rounding):
    x = torch.zeros(3, 70)
    x[1, 5] = float("nan")
    found = round_inputs(x, torch.tensor(2.0), rounding)
    assert found.shape == x.shape and not found[[0, 2]].any() and found[1, : rounding.group].isnan().any()
    x[1, 5] = float("inf")
    assert rounding is NVFP4 or round_inputs(x, None, rounding)[1, 5].isnan()


@pytest.mark.parametrize("excluded", [{"cpu"}, {"cpu", "dequantized"}, set()], ids=["dequantized", "reference", "any"])
@pytest.mark.parametrize(
    ("scheme", "rounding", "group", "unit"),
    [
        ("lut4a16", InputRounding(), 32, None),
        ("lut4a4", MXFP4, 32, None),
        ("lut4a4", NVFP4, 16, 3.7),
        ("lut4a8", MXFP8, 32, None),
        ("lut4a8", InputRounding(), 32, 0.02),
    ],
    ids=["a16", "mxfp4", "nvfp4", "mxfp8", "static"],
)
def test_layers_multiply_rounded_inputs(excluded, scheme, rounding, group, unit):
    for m, n, k in ((1, 40, 96), (7, 33, 320)):
        weight = make(n, k, group, rounding, scheme, unit)
        ops = Ops(torch.device("cpu"), torch.float32, excluded=frozenset(excluded))
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
        inputs = x if scheme == "lut4a16" else round_inputs(x, weight.input_scale, rounding)
        wanted = inputs.double() @ truth(weight).T + weight.bias.double()
        assert (ops.linear(weight)(x) - wanted).norm() / wanted.norm() < 3e-6
        assert {bound.kind for bound in ops.bound} == {scheme}


class Part:
    """One rank by itself, which keeps its part of every sum."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2

    def gather(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        raise AssertionError("no layer is gathered here")

    def sum(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(("rounding", "unit"), [(MXFP4, None), (NVFP4, 3.7)], ids=["mxfp4", "nvfp4"])
def test_ranks_round_their_own_inputs_alike(rounding, unit):
    weight = make(64, 512, rounding.group, rounding, "lut4a4", unit)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    whole = Ops(torch.device("cpu"), torch.float32).linear(weight)(x)
    total = torch.zeros_like(whole)
    for rank in range(2):
        ops = RowParallelOps(Ops(torch.device("cpu"), torch.float32), Part(rank))
        layer = ops.linear(weight, role=ROW)
        assert layer.has_local_inputs
        total += layer(x[:, layer.inputs])
    assert (total - whole).norm() / whole.norm() < 2e-6
    with pytest.raises(AssertionError, match="all inputs of a scale"):
        replace(weight).with_inputs(8, 256)
