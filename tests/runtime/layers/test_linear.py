"""Several linear layers as one, dense or quantized."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.runtime.layers.linear import ConcatLinear
from aiakq.runtime.loader.dummy_weights import random_weight
from aiakq.spec import LayerSpec

CPU = torch.device("cpu")
#: Relative RMS.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("m", [1, 4, 7])
def test_outputs_lie_one_after_the_other_whatever_the_weights_are_stored_as(m: int, dtype: torch.dtype) -> None:
    """As queries in floats, keys in 4 bits and values in 8 bits would: no two weights can be one."""
    generator = torch.Generator().manual_seed(m)
    ops, k = Ops(CPU, dtype), 96
    weight, bias = torch.randn(40, k, generator=generator).to(dtype), torch.randn(40, generator=generator).to(dtype)
    quantized = [random_weight(LayerSpec(bits, 32), n, k, None, CPU, generator) for bits, n in ((4, 24), (8, 8))]
    layer = ConcatLinear([ops.dense(weight, bias), *(ops.linear(each) for each in quantized)])
    x = torch.randn(m, k, generator=generator).to(dtype)
    found = layer(x)
    expected = torch.cat(
        [x.double() @ weight.double().T + bias.double()]
        + [x.double() @ dequantize(each).double().T for each in quantized],
        dim=1,
    )
    assert found.dtype == dtype and found.shape == (m, 72)
    assert float((found.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


def test_parts_that_want_different_layouts_get_plain_tensors() -> None:
    ops = Ops(CPU, torch.float32)
    layer = ConcatLinear([ops.dense(torch.ones(n, 32)) for n in (3, 5)])
    assert layer.input_layout(16) is None
