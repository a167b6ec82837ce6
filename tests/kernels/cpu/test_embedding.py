"""Rows of quantized weights, looked up in the tiles of the product, have the values that their format defines."""

from __future__ import annotations

import pytest
import torch

from aiakq.kernels.cpu import linear
from aiakq.kernels.ops.linear_reference import dequantize


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("zeros", [None, "codes", "offsets"])
@pytest.mark.parametrize("exact", [True, False])
def test_rows_are_those_of_the_weight(isa, bits, zeros, exact, make_weight):
    ids = torch.tensor([0, 40, 69, 16, 31, 32])
    for group, k in ((16, 96), (32, 96), (96, 96), (256, 512)):
        weight = make_weight(70, k, bits, group, zeros)
        problem = weight.problem(torch.float32, "cpu", exact=exact)
        assert linear.looks_up_rows(weight, problem)
        found = linear.prepare(weight, problem).embedding(torch.float32)(ids)
        # Offsets of 8 bits are added to codes - 128 in exact math.
        assert torch.allclose(found, dequantize(weight, torch.float32)[ids], rtol=1e-6, atol=1e-4 if zeros else 0)


@pytest.mark.parametrize("table", ["e2m1", "int8"])
@pytest.mark.parametrize("exact", [True, False])
def test_rows_of_indices_are_the_values_of_the_table(isa, table, exact, make_weight):
    weight = make_weight(40, 64, 4, 32, table=table)
    layer = linear.prepare(weight, weight.problem(torch.float32, "cpu", exact=exact))
    ids = torch.arange(40)
    assert torch.equal(layer.embedding(torch.float32)(ids), dequantize(weight, torch.float32))


def test_rows_outside_are_nan_and_others_are_rounded_once(native, make_weight):
    weight = make_weight(33, 64, 4, 32)
    layer = linear.prepare(weight, weight.problem(torch.bfloat16, "cpu", exact=False))
    found = layer.embedding(torch.bfloat16)(torch.tensor([32, 33, -1]))
    assert torch.equal(found[0], dequantize(weight, torch.float32)[32].bfloat16())
    assert found[1:].isnan().all()


def test_weights_whose_rows_are_not_in_order_or_rounded_are_not_looked_up(native, make_weight):
    for weight in (
        make_weight(33, 64, 4, 32, perm=True),
        make_weight(33, 64, 4, 8),
        make_weight(33, 64, 8, 64, w8a8=True),
        make_weight(33, 64, 4, 32, table="nf4"),
    ):
        assert not linear.looks_up_rows(weight, weight.problem(torch.float32, "cpu", exact=False))
