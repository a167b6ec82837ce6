"""Weights rounded to 8 bits have the codes and scales of torch's loops."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.cpu import rounding
from aiakq.rounding.integers import round_weight, smallest_scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 7, 16, 100, 512])
def test_codes_and_scales_are_those_of_torch(isa, dtype, k):
    make = torch.Generator().manual_seed(k)
    weight = torch.randn(70, k, generator=make) * torch.logspace(-9, 3, 70)[:, None]
    weight[3] = 0
    weight[4] = -weight[4].abs()
    weight = weight.to(dtype)
    codes, scales = rounding.round_rows(weight, smallest_scale(dtype))
    wanted, of_rows, _ = round_weight(weight.float(), 8, -1, True, dtype)
    assert torch.equal(scales, of_rows.squeeze(1))
    assert torch.equal(codes, wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_makes_the_scale_of_its_row_no_number(isa, value):
    weight = torch.randn(5, 40)
    weight[2, 17] = value
    scales = rounding.round_rows(weight, smallest_scale(torch.float32))[1]
    assert torch.isfinite(scales).tolist() == [True, True, False, True, True]


def test_integers_and_other_devices_are_left_to_torch(native):
    assert rounding.supports(torch.zeros(2, 2))
    assert not rounding.supports(torch.zeros(2, 2, dtype=torch.int8))
    assert not rounding.supports(torch.zeros(2, 2, device="meta"))
