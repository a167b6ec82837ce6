"""A weight in rows of blocks: rows and inputs are picked, and weights joined, as those of an unpacked one."""

from __future__ import annotations

import pytest
import torch

from aiakq.formats.gguf.decoding import read_blocks, read_weight
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.kernels.block_weight import BlockWeight
from aiakq.kernels.ops.linear_reference import dequantize
from aiakq.runtime.loader.binding import concatenate


def weights(kind_name: str, n: int, k: int, bias: bool = False, seed: int = 0):
    """Return the same weight unpacked and in blocks."""
    kind, make = KINDS[NUMBERS[kind_name]], torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 60, (n, kind.row_bytes(k)), generator=make).to(torch.uint8)
    biases = torch.randn(n, generator=make) if bias else None
    return read_weight(rows, kind, "linear", biases), read_blocks(rows, kind, "linear", biases)


def test_tensors_are_unpacked_when_they_are_asked_for():
    one, two = weights("Q4_K", 3, 512, bias=True)
    assert (two.n, two.k, two.bits, two.scheme, two.group_size, two.has_offsets) == (3, 512, 4, "w4a16", 32, True)
    assert "unpacked" not in vars(two)
    for name in ("codes", "scales", "offsets", "bias"):
        assert torch.equal(getattr(two, name), getattr(one, name)), name
    assert torch.equal(dequantize(two), dequantize(one))


def test_rows_are_picked_without_unpacking():
    one, two = weights("Q6_K", 8, 256, bias=True)
    order = torch.tensor([5, 0, 7])
    found = two.with_rows(order)
    assert isinstance(found, BlockWeight) and "unpacked" not in vars(two)
    assert torch.equal(dequantize(found), dequantize(one)[order]) and torch.equal(found.bias, one.bias[order])


@pytest.mark.parametrize("ends", [(256, 512), (0, 128), (256, 1024)])
def test_inputs_are_those_of_whole_blocks_or_unpacked(ends):
    one, two = weights("Q3_K", 4, 1024)
    found = two.with_inputs(*ends)
    assert isinstance(found, BlockWeight) == (ends != (0, 128))
    assert torch.equal(dequantize(found), dequantize(one)[:, slice(*ends)])


def test_weights_of_the_same_kind_are_joined():
    pairs = [weights("Q4_0", 4, 64, bias=True, seed=seed) for seed in range(3)]
    found = concatenate([two for _, two in pairs])
    assert isinstance(found, BlockWeight)
    assert torch.equal(dequantize(found), torch.cat([dequantize(one) for one, _ in pairs]))
    assert torch.equal(found.bias, torch.cat([one.bias for one, _ in pairs]))


def test_other_weights_are_not_joined():
    first = weights("Q4_0", 4, 256)[1]
    assert concatenate([first, weights("Q8_0", 4, 256)[1]]) is None
    assert concatenate([first, weights("Q4_0", 4, 256, bias=True)[1]]) is None
    assert concatenate([first, weights("Q4_0", 4, 256)[0]]) is None


def test_ternary_kinds_are_unpacked_at_once():
    assert not isinstance(weights("TQ2_0", 2, 256)[1], BlockWeight)
