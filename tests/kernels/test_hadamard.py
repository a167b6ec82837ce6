"""Rotated inputs: QuaRot's matrices, bit for bit, and results that do not depend on the other rows."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from aiakq.kernels.hadamard import ORDERS, factors, matrix, rotate
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.kernels.ops.row_parallel import _straddles
from aiakq.kernels.types import QWeight

#: First digits of the sha256 of each matrix as int8, from the tables that GPTQModel 7.6 and QuaRot use.
DIGESTS = {
    12: "67507aecbe2abee5",
    20: "f54960fecf1ccf70",
    28: "a6cb994c78f9acd4",
    36: "d674d8240e6b622b",
    40: "b36c95bcae918f98",
    52: "9ee082772819b105",
    60: "091e76fba0aef583",
    108: "690a34c6c9ed2f0e",
    140: "b9ff01506ffe4db5",
    156: "99a1b852ce559ffd",
    172: "378ef12c7cc31f3e",
}


@pytest.mark.parametrize("order", ORDERS)
def test_matrices_are_those_of_other_programs(order):
    found = matrix(order)
    assert torch.equal(found @ found.T, order * torch.eye(order))
    assert hashlib.sha256(found.to(torch.int8).numpy().tobytes()).hexdigest()[:16] == DIGESTS[order]


def test_sizes_without_a_matrix_are_known():
    assert factors(11008) == (172, 64) and factors(14336) == (28, 512) and factors(4096) == (1, 4096)
    assert factors(18944) is None and factors(4864) is None and factors(36 * 3) == (108, 1)


@pytest.mark.parametrize("size", [2, 256, 12, 40, 224, 344, 560])
def test_the_rotation_is_the_kronecker_product(size):
    order, power = factors(size)
    sylvester = torch.ones(1, 1)
    while len(sylvester) < power:
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), sylvester)
    base = matrix(order) if order > 1 else torch.ones(1, 1)
    whole = torch.kron(base, sylvester) / size**0.5
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(rotate(x), x @ whole.T, atol=1e-5)
    assert torch.allclose(rotate(rotate(x), inverse=True), x, atol=1e-5)


@pytest.mark.parametrize("size", [256, 24, 1376])
def test_a_rotated_row_does_not_depend_on_the_others(size):
    x = torch.randn(200, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    together = rotate(x)
    for first, end in ((0, 1), (7, 10), (100, 117), (3, 200)):
        assert torch.equal(rotate(x[first:end]), together[first:end])


def test_a_layer_with_rotated_inputs_computes_its_dequantized_weight():
    make = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (64, 224), generator=make).to(torch.uint8)
    plain = QWeight("w4a16", codes, (torch.rand(64, 7, generator=make) - 0.5) / 50, group_size=32)
    rotated = replace(plain, rotated=True)
    x = torch.randn(3, 224, generator=make)
    layer = Ops(torch.device("cpu"), torch.float32).linear(rotated)
    assert torch.allclose(layer(x), x @ dequantize(rotated).T, atol=1e-4)
    assert torch.allclose(layer(x), rotate(x) @ dequantize(plain).T, atol=1e-4)
    assert _straddles(plain, [0, 96, 224]) is None
    assert "rotated" in str(_straddles(rotated, [0, 96, 224]))
