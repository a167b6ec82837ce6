"""Weights in the words of a file: the layers and the codes that their unpacked copies have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aiakq.kernels.ops import Ops
from aiakq.kernels.packing import pack
from aiakq.kernels.types import QWeight
from aiakq.kernels.word_weight import WORD_BITS, WordWeight


def word_weight(
    bits: int, n: int, k: int, transposed: bool = False, group: int = 32, zeros: bool = False
) -> WordWeight:
    torch.manual_seed(bits + n)
    words = pack(torch.randint(0, 2**bits, (n, k)), bits)
    scales = torch.randn(n, -(-k // group))
    points = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8) if zeros else None
    return WordWeight(words.T.contiguous().T if transposed else words, bits, k, scales, points, torch.randn(n), group)


def product(weight: QWeight, x: Tensor, exact: bool) -> Tensor:
    return Ops(torch.device("cpu"), torch.float32, exact=exact).linear(weight)(x)


@pytest.mark.parametrize("bits", WORD_BITS)
@pytest.mark.parametrize(("n", "k"), [(64, 128), (50, 96), (33, 32), (40, 48)])
@pytest.mark.parametrize("transposed", [False, True])
def test_layers_multiply_as_those_of_unpacked_weights(bits: int, n: int, k: int, transposed: bool) -> None:
    weight = word_weight(bits, n, k, transposed, group=16 if k % 32 else 32, zeros=transposed)
    x = torch.randn(3, k)
    for exact in (True, False):
        assert torch.equal(product(weight, x, exact), product(weight.unpacked, x, exact))


def test_rows_and_inputs_are_those_of_the_unpacked_weight() -> None:
    weight = word_weight(4, 64, 128, transposed=True, zeros=True)
    rows = torch.tensor([5, 0, 63])
    for part, expected in (
        (weight.with_rows(rows), weight.unpacked.with_rows(rows)),
        (weight.with_inputs(32, 96), weight.unpacked.with_inputs(32, 96)),
        (weight.with_bias(None), weight.unpacked.with_bias(None)),
    ):
        for name in ("codes", "scales", "zeros", "bias"):
            found, wanted = getattr(part, name), getattr(expected, name)
            assert (found is None) == (wanted is None) and (found is None or torch.equal(found, wanted)), name


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_joined_in_words(transposed: bool) -> None:
    first, second = (word_weight(4, n, 64, transposed) for n in (32, 20))
    whole = first.followed_by([second])
    assert whole is not None and torch.equal(whole.codes, torch.cat([first.codes, second.codes]))
    assert whole.bias is not None and first.bias is not None and torch.equal(whole.bias[:32], first.bias)
    assert first.followed_by([second.unpacked]) is None
    assert first.followed_by([word_weight(4, 8, 64, not transposed)]) is None
