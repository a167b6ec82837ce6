"""Quantized weights in torch's linears: inputs are multiplied, then rounded."""

from __future__ import annotations

import torch
from torch import nn

from aiakq.kernels.ops.block_floats import round_inputs
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.types import InputRounding, QWeight
from aiakq.quantizers.model.plain_linears import take_weight


def test_factors_of_inputs_come_before_their_rounding() -> None:
    make = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (6, 32), generator=make, dtype=torch.uint8)
    x, factors = torch.randn(3, 32, generator=make), torch.rand(32, generator=make) + 0.5
    for scheme, rounding in (("w8a16", InputRounding()), ("w8a8", InputRounding(elements="int8"))):
        weight = QWeight(scheme, codes, torch.rand(6, 1, generator=make), rounding=rounding)
        plain, scaled = nn.Linear(32, 6, bias=False), nn.Linear(32, 6, bias=False)
        take_weight(plain, weight, torch.device("cpu"))
        weight.factors = factors
        take_weight(scaled, weight, torch.device("cpu"))
        torch.testing.assert_close(scaled(x), plain(x * factors))
    wanted = round_inputs(x * factors, None, rounding) @ dequantize(QWeight("w8a16", codes, weight.scales)).T
    torch.testing.assert_close(scaled(x), wanted)
