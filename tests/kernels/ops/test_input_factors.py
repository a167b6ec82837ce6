"""Layers whose inputs are multiplied by factors: before they are rounded, with every implementation, and in shards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aiakq.formats.decoded_weight import as_floats
from aiakq.kernels.ops import Ops
from aiakq.kernels.ops.block_floats import round_inputs
from aiakq.kernels.types import InputRounding, QWeight
from aiakq.runtime.loader.binding import concatenate

N, K, GROUP = 48, 96, 32
CPU = torch.device("cpu")


def weight(seed: int = 0, **fields: object) -> QWeight:
    make = torch.Generator().manual_seed(seed)
    values: dict[str, object] = {
        "scheme": "w4a16",
        "codes": torch.randint(0, 16, (N, K), generator=make, dtype=torch.uint8),
        "scales": torch.rand(N, K // GROUP, generator=make) / 8 + 0.01,
        "group_size": GROUP,
        "bias": torch.randn(N, generator=make),
        "factors": torch.rand(K, generator=make) * 3 + 0.1,
    }
    return QWeight(**{**values, **fields})  # type: ignore[arg-type]


def inputs() -> Tensor:
    return torch.randn(5, K, generator=torch.Generator().manual_seed(9))


def plain(given: QWeight) -> Tensor:
    return as_floats(replace(given, factors=None))


def expected(given: QWeight, x: Tensor) -> Tensor:
    assert given.factors is not None and given.bias is not None
    return (x * given.factors) @ plain(given).T + given.bias


@pytest.mark.parametrize("excluded", [(), ("cpu",)], ids=["native", "torch"])
def test_inputs_are_multiplied_first(excluded: tuple[str, ...]) -> None:
    given, x = weight(), inputs()
    layer = Ops(CPU, torch.float32, excluded=excluded).linear(given)
    torch.testing.assert_close(layer(x), expected(given, x))


def test_inputs_are_multiplied_before_they_are_rounded() -> None:
    rounding = InputRounding(elements="int8")
    given, x = weight(scheme="w4a8", rounding=rounding), inputs()
    assert given.factors is not None and given.bias is not None
    rounded = round_inputs(x * given.factors, None, rounding)
    torch.testing.assert_close(Ops(CPU, torch.float32).linear(given)(x), rounded @ plain(given).T + given.bias)


def test_the_dequantized_weight_has_the_factors_in_its_columns() -> None:
    given, x = weight(bias=None), inputs()
    assert given.factors is not None
    torch.testing.assert_close(as_floats(given), plain(given) * given.factors)
    torch.testing.assert_close(x @ as_floats(given).T, (x * given.factors) @ plain(given).T)


@pytest.mark.parametrize("order", [None, torch.arange(K).flip(0)], ids=["natural", "ordered"])
def test_shards_of_inputs_keep_their_own_factors(order: Tensor | None) -> None:
    given, x = weight(perm=order), inputs()
    assert given.bias is not None
    ops = Ops(CPU, torch.float32)
    total = -given.bias
    for first, end in ((0, 32), (32, 96)):
        own = x[:, first:end] if order is None else x[:, order[first:end]]
        total = total + ops.linear(given.with_inputs(first, end))(own)
    torch.testing.assert_close(total, expected(given, x))


def test_only_layers_with_the_same_factors_are_joined() -> None:
    one, other = weight(0), weight(1)
    assert concatenate([one, other]) is None and concatenate([one, replace(other, factors=None)]) is None
    joined = concatenate([one, replace(other, factors=one.factors)])
    assert joined is not None and joined.factors is one.factors
