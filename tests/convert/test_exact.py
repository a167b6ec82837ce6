"""Weights in the terms of other formats: the same numbers, or a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aiakq.convert.exact import Abilities, Inexact, expressed
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.types import QWeight
from aiakq.spec import Float8, LayerSpec

N, K = 6, 96


def weight(bits: int = 4, group: int = 32, zeros: bool = False, signed: bool = False, **fields: object) -> QWeight:
    make = torch.Generator().manual_seed(0)
    groups = -(-K // group)
    scales = torch.rand(N, groups, generator=make) + 0.1
    if signed:
        scales = torch.where(torch.rand(N, groups, generator=make) < 0.5, -scales, scales)
    values: dict[str, object] = {
        "scheme": f"w{bits}a16",
        "codes": torch.randint(0, 2**bits, (N, K), generator=make, dtype=torch.uint8),
        "scales": scales.half(),
        "zeros": torch.randint(0, 2**bits, (N, groups), generator=make, dtype=torch.uint8) if zeros else None,
        "group_size": group,
    }
    return QWeight(**{**values, **fields})  # type: ignore[arg-type]


def same(found: QWeight, wanted: QWeight) -> bool:
    return torch.equal(dequantize(found), dequantize(wanted))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("bits", "wider"), [(2, 3), (3, 4), (4, 8), (2, 8), (5, 8)])
def test_codes_are_widened(bits: int, wider: int, zeros: bool) -> None:
    given = weight(bits, zeros=zeros)
    found = expressed(given, LayerSpec(wider, 32, symmetric=not zeros), Abilities())
    assert found.bits == wider and same(found, given)
    with pytest.raises(Inexact, match="bits"):
        expressed(found, LayerSpec(bits, 32, symmetric=not zeros), Abilities())


@pytest.mark.parametrize(("group", "smaller"), [(32, 16), (96, 32), (96, 64), (64, 32), (64, 16)])
def test_groups_are_split(group: int, smaller: int) -> None:
    given = weight(group=group, zeros=True)
    found = expressed(given, LayerSpec(4, smaller, symmetric=False), Abilities())
    assert found.group_size == smaller and found.scales.shape == (N, -(-K // smaller)) and same(found, given)


def test_groups_with_equal_scales_are_joined() -> None:
    given = weight(group=96, zeros=True)
    split = expressed(given, LayerSpec(4, 16, symmetric=False), Abilities())
    for size, groups in ((32, 3), (48, 2), (64, 2), (-1, 1)):
        found = expressed(split, LayerSpec(4, size, symmetric=False), Abilities())
        assert found.scales.shape == (N, groups) and same(found, given)


def test_groups_are_not_joined() -> None:
    for size in (64, -1, 48):
        with pytest.raises(Inexact, match="shared by 32 inputs"):
            expressed(weight(), LayerSpec(4, size), Abilities())


def test_symmetric_weights_get_zero_points_and_those_are_not_dropped() -> None:
    given = weight()
    found = expressed(given, LayerSpec(4, 32, symmetric=False), Abilities())
    assert found.zeros is not None and bool((found.zeros == 8).all()) and same(found, given)
    with pytest.raises(Inexact, match="zero points"):
        expressed(weight(zeros=True), LayerSpec(4, 32), Abilities())


@pytest.mark.parametrize("zeros", [False, True])
def test_negative_scales_become_mirrored_codes(zeros: bool) -> None:
    given = weight(zeros=zeros, signed=True)
    found = expressed(given, LayerSpec(4, 32, symmetric=False), Abilities(signed_scales=False))
    assert bool((found.scales > 0).all()) and same(found, given)
    with pytest.raises(Inexact, match="negative scales" if not zeros else "."):
        expressed(given, LayerSpec(4, 32), Abilities(signed_scales=False))
    assert same(expressed(given, LayerSpec(4, 32, symmetric=not zeros), Abilities()), given)


def test_whole_offsets_become_zero_points() -> None:
    zeros = weight(zeros=True)
    assert zeros.zeros is not None
    offsets = -zeros.zeros.float() * zeros.scales.float()
    given = replace(zeros, zeros=None, offsets=offsets)
    found = expressed(given, LayerSpec(4, 32, symmetric=False), Abilities())
    assert found.offsets is None and torch.equal(found.zeros, zeros.zeros)
    assert same(found, zeros)
    with pytest.raises(Inexact, match="offsets are not whole"):
        expressed(replace(given, offsets=offsets + 0.01), LayerSpec(4, 32, symmetric=False), Abilities())
    halves = replace(zeros, zeros=zeros.zeros.float() + 0.5)
    with pytest.raises(Inexact, match="zero points are not codes"):
        expressed(halves, LayerSpec(4, 32, symmetric=False), Abilities())


def test_what_has_no_words_in_other_formats_is_named() -> None:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
    floats = weight(8, scheme="fp8a16", code_type=torch.float8_e4m3fn)
    table = replace(weight(), scheme="lut4a16", table=torch.arange(16.0))
    eight = weight(8, 96, scheme="w8a8")
    for given, layer, reason in (
        (weight(perm=order), LayerSpec(4, 32), "act-order"),
        (weight(rotated=True), LayerSpec(4, 32), "rotated"),
        (weight(factors=torch.ones(K)), LayerSpec(4, 32), "multiplied by factors"),
        (floats, LayerSpec(8, 32), "8-bit floats"),
        (weight(8), LayerSpec(8, 32, float8=Float8()), "not 8-bit floats"),
        (table, LayerSpec(4, 32), "table"),
        (eight, LayerSpec(8), "activations are rounded"),
        (weight(8, 96), LayerSpec(8, activation_bits=8), "not rounded"),
    ):
        with pytest.raises(Inexact, match=reason):
            expressed(given, layer, Abilities())
    ordered = weight(perm=order)
    assert same(expressed(ordered, LayerSpec(4, 16), Abilities(input_order=True)), ordered)


def test_scales_are_cast_only_if_that_changes_none() -> None:
    given = weight()
    wide = replace(given, scales=given.scales.float())
    assert expressed(wide, LayerSpec(4, 32), Abilities(scales=torch.float16)).scales.dtype == torch.float16
    with pytest.raises(Inexact, match="float16, and not all of them are bfloat16"):
        expressed(given, LayerSpec(4, 32), Abilities(scales=torch.bfloat16))
