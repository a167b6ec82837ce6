"""Activation functions by the names of configs, against those of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from aiakq.errors import AiakqError
from aiakq.kernels.ops import Ops
from aiakq.runtime.layers.activation import activation

CPU = torch.device("cpu")
NAMES = ["silu", "swish", "relu", "relu2", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu"]
#: Largest difference from float64, for results of magnitude one.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def rows(m: int, width: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(m, width, generator=torch.Generator().manual_seed(m * width)) * 3
    x[0, :3] = torch.tensor([0.0, 30.0, -30.0])
    return x.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_functions_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    function = activation(name, Ops(CPU, dtype))
    for m, width in ((1, 3), (5, 37), (8, 64)):
        x = rows(m, width, dtype)
        expected = ACT2FN[name](x.double())
        found = function(x)
        assert isinstance(found, Tensor) and found.dtype == dtype and found.shape == x.shape
        torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_first_half_gates_the_second(name: str, dtype: torch.dtype) -> None:
    function = activation(name, Ops(CPU, dtype))
    for m, width in ((1, 3), (5, 37), (8, 64)):
        gate, up = rows(m, width, dtype), torch.randn(m, width, generator=torch.Generator().manual_seed(7)).to(dtype)
        expected = ACT2FN[name](gate.double()) * up.double()
        found = function.gated(torch.cat((gate, up), dim=1))
        assert isinstance(found, Tensor) and found.dtype == dtype and found.shape == (m, width)
        torch.testing.assert_close(found.double(), expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(AiakqError, match="activation function 'mish'") as caught:
        activation("mish", Ops(CPU, torch.float32))
    assert caught.value.id == "unsupported"
    assert all(name in str(caught.value) for name in NAMES)
