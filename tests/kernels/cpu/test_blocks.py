"""Rows of blocks, packed natively: the bytes and results of a weight that was unpacked before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aiakq.formats.gguf.blocks import LAYOUTS
from aiakq.formats.gguf.decoding import read_blocks, read_weight
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.kernels.block_weight import BlockWeight
from aiakq.kernels.cpu import library, linear

#: Random blocks of every kind.
STORED = Path(__file__).parents[2] / "formats" / "gguf_fixtures" / "blocks.safetensors"
PACKED = [name for name in LAYOUTS if not name.startswith("TQ")]


@pytest.fixture(scope="module")
def stored():
    return load_file(STORED)


def rows_of(blocks: torch.Tensor, kind, n: int, k: int) -> torch.Tensor:
    """Return rows [N, bytes of K values] of blocks that were picked at random."""
    every = blocks.view(-1, kind.nbytes)
    chosen = torch.randint(0, len(every), (n, k // kind.values), generator=torch.Generator().manual_seed(n))
    return every[chosen].flatten(1)


def values(layer: linear.NativeLinear) -> list[torch.Tensor]:
    """Return the scales and offsets of a layer, times their steps, per output and group."""
    op, found = layer.op, []
    for name in ("scale", "offset"):
        at, steps = getattr(op, f"{name}s"), getattr(op, f"{name}_steps")
        if at:
            held = {each.data_ptr(): each for each in layer.tensors}
            numbers = held[at].float().view(-1, op.groups, 32)
            if steps:
                numbers = numbers * held[steps].view(-1, op.steps, 32).repeat_interleave(1 << op.step_shift, dim=1)
            found.append(numbers.transpose(1, 2).reshape(-1, op.groups)[: op.n])
    return found


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", PACKED)
def test_codes_scales_and_products_are_those_of_the_unpacked_weight(isa, name, exact, stored):
    kind = KINDS[NUMBERS[name]]
    rows, bias = rows_of(stored[f"{name}.blocks"], kind, 45, 512), torch.randn(45)
    one, two = read_weight(rows, kind, "linear", bias), read_blocks(rows, kind, "linear", bias)
    problem = one.problem(torch.float32, "cpu", exact=exact)
    assert two.problem(torch.float32, "cpu", exact=exact) == problem
    wanted, found = linear.prepare(one, problem), linear.prepare(two, problem)
    assert "unpacked" not in vars(two)
    assert torch.equal(found.tensors[0], wanted.tensors[0])
    assert all(torch.equal(*pair) for pair in zip(values(found), values(wanted), strict=True))
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    for m in (1, 5):
        torch.testing.assert_close(found(x[:m]), wanted(x[:m]), rtol=0, atol=0, equal_nan=True)
    assert linear.looks_up_rows(two, problem) == linear.looks_up_rows(one, problem)


def test_a_layer_of_blocks_looks_up_its_rows(stored, native):
    kind = KINDS[NUMBERS["Q6_K"]]
    rows = rows_of(stored["Q6_K.blocks"], kind, 40, 256)
    one, two = read_weight(rows, kind, "embedding"), read_blocks(rows, kind, "embedding")
    problem, ids = one.problem(torch.float32, "cpu"), torch.tensor([39, 0, 7])
    wanted = linear.prepare(one, problem).embedding(torch.float32)(ids)
    assert torch.equal(linear.prepare(two, problem).embedding(torch.float32)(ids), wanted)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q3_K", "MXFP4"])
def test_numbers_that_are_none_are_refused_by_name(name, stored, native):
    kind = KINDS[NUMBERS[name]]
    rows = rows_of(stored[f"{name}.blocks"], kind, 33, 256)
    first = {"Q3_K": 108, "Q4_1": 2}.get(name, 0)
    rows[32, first : first + 2] = 255
    weight = read_blocks(rows, kind, "model.layers.0.mlp.up_proj")
    with pytest.raises(Exception, match=r"up_proj\.weight"):
        linear.prepare(weight, weight.problem(torch.float32, "cpu"))


def test_another_kind_is_refused(stored, native):
    weight = read_blocks(torch.zeros(1, 18, dtype=torch.uint8), KINDS[NUMBERS["Q4_0"]], "linear")
    assert isinstance(weight, BlockWeight)
    null = [None] * 3
    status = library.load_library().cdll.aiakq_pack_blocks(*null, 0, 32, 34, 0, *null, None, None, 1)
    assert status
