"""Rounding at load is the rounding of aiakq quantize, a few rows at a time."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.rounding import at_load, integers
from aiakq.rounding.integers import round_weight
from aiakq.rounding.ranges import round_searched
from aiakq.spec import Float8, LayerSpec


def weight(dtype: torch.dtype) -> torch.Tensor:
    dense = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)) * 0.05
    dense[3] = 0
    return dense.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_and_scales_are_those_of_quantize(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "_AT_ONCE", 1024)  # several parts
    dense, bias = weight(dtype), torch.ones(40)
    found = at_load.rounded(dense, bias, LayerSpec(8))
    codes, scales, _ = round_weight(dense.float(), 8, -1, True, dtype)
    assert torch.equal(found.codes, codes) and torch.equal(found.scales.float(), scales) and found.bias is bias
    assert found.scales.dtype == dtype and found.scheme == "w8a16"
    found = at_load.rounded(dense, None, LayerSpec(4, 64))
    codes, scales, _ = round_searched(dense.float(), 4, 64, True, dtype, signed=True)
    assert torch.equal(found.codes, codes) and torch.equal(found.scales.float(), scales) and found.group_size == 64


def test_8_bit_floats_have_a_scale_per_row() -> None:
    dense = weight(torch.bfloat16)
    found = at_load.rounded(dense, None, LayerSpec(8, float8=Float8()))
    scales = dense.float().abs().amax(1, keepdim=True) / 448
    scales[3] = 1
    wanted = (dense.float() / scales).to(torch.float8_e4m3fn).float() * scales
    assert torch.equal(dequantize(found), wanted) and found.scheme == "fp8a16"
    assert float((wanted - dense.float()).norm() / dense.float().norm()) < 0.04
