"""Scales of 4-bit floats that are found again in 8 bits, for each output."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.triton.float_scales import E4M3, E8M0, FLOAT32, store

N, GROUPS = 5, 6


def codes_of(group: int) -> torch.Tensor:
    return torch.full((N, GROUPS * group), 3, dtype=torch.uint8)


def read(stored: torch.Tensor, factors: torch.Tensor, kind: int) -> torch.Tensor:
    """The scales [N, groups] float64 of what ``store`` returns."""
    if kind == FLOAT32:
        return stored.double() * factors.double()[:, None]
    codes = stored.contiguous().view(torch.uint8)[:, :GROUPS]
    if kind == E4M3:
        return codes.view(torch.float8_e4m3fn).double() * factors.double()[:, None]
    return torch.where(codes == 0, 0.0, torch.exp2(codes.double() - 127)) * factors.double()[:, None]


def test_powers_of_two_are_exact_over_the_range_of_a_row():
    exponents = torch.tensor([[-127, -100, -50, -20, -10, -1], [1, 127, 3, 4, 5, 6], *[[0, -8, 3, 2, 1, 0]] * 3])
    scales = torch.exp2(exponents.double()).to(torch.bfloat16)
    stored, factors, kind = store(scales, codes_of(32), 32)
    assert kind == E8M0 and stored.shape == (N, 2) and stored.dtype == torch.int32
    assert torch.equal(read(stored, factors, kind), scales.double())


def test_multiples_of_a_number_of_each_output_are_found():
    """Also of numbers below the smallest normal one, and where the largest is not one that quantizers make it."""
    numbers = torch.tensor(
        [[0x7E, 1, 0, 0x38, 5, 9], [0x77, 1, 2, 3, 7, 8], [1, 2, 3, 4, 5, 7], [0] * 6, [0x3F, 0x11, 0x22, 0x33, 4, 5]]
    )
    unit = torch.tensor([3000.7, 1.0, 123.456, 2.0, 1e-3])
    scales = numbers.to(torch.uint8).view(torch.float8_e4m3fn).float() / unit[:, None]
    found = store(scales, codes_of(16), 16)
    assert found[2] == E4M3
    assert torch.allclose(read(*found), scales.double(), rtol=2**-22, atol=0)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("case", ["any", "negative", "wide"])
def test_other_scales_stay_floats(case, group):
    scales = torch.rand(N, GROUPS, generator=torch.Generator().manual_seed(0)) + 0.5
    if case != "any":
        scales = torch.exp2(torch.arange(GROUPS).float() * (30 if case == "wide" else 1)).repeat(N, 1)
    if case == "negative":
        scales[1, 2] *= -1
    found = store(scales, codes_of(group), group)
    assert found[2] == FLOAT32 and torch.equal(read(*found), scales.double())


def test_scales_of_groups_without_values_do_not_matter():
    """Files may have the smallest power of two there."""
    scales = torch.full((N, GROUPS), 2.0)
    scales[:, 1] = 2.0**-127
    codes = codes_of(32)
    codes[:, 32:64] = torch.tensor([0, 8]).to(torch.uint8).repeat(16)
    stored, factors, kind = store(scales, codes, 32)
    assert kind == E8M0 and read(stored, factors, kind)[:, 1].eq(0).all()
    assert read(stored, factors, kind)[:, [0, *range(2, GROUPS)]].eq(2).all()
