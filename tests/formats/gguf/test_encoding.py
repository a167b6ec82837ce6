"""Blocks that are written: no worse than those of llama-quantize, exact for quantized weights that they can hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aiakq.errors import AiakqError
from aiakq.formats.gguf.decoding import read_floats, read_weight, values_of
from aiakq.formats.gguf.encoding import ENCODERS, encode, exact_blocks
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.kernels.types import QWeight

#: Rows of tinybooks, and the values to which llama-quantize --pure rounds them.
ROUNDED = Path(__file__).parents[1] / "gguf_fixtures" / "rounded.safetensors"
BLOCKS = Path(__file__).parents[1] / "gguf_fixtures" / "blocks.safetensors"


def decoded(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    return read_floats(blocks, KINDS[NUMBERS[kind]], "linear")


@pytest.mark.parametrize("kind", ENCODERS)
def test_the_error_is_at_most_that_of_llama_quantize(kind):
    stored = load_file(ROUNDED)
    weight, theirs = stored["weight"].float(), decoded(stored[kind], kind)
    ours = decoded(encode(weight, kind), kind)
    assert float((ours - weight).square().sum()) < 0.99 * float((theirs - weight).square().sum())


@pytest.mark.parametrize("kind", ENCODERS)
def test_errors_count_by_the_importance_of_inputs(kind):
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    importance = torch.full((256,), 0.01)
    importance[::5] = 10.0
    plain = decoded(encode(weight, kind), kind) - weight
    weighted = decoded(encode(weight, kind, importance=importance), kind) - weight
    assert float((weighted.square() * importance).sum()) < 0.9 * float((plain.square() * importance).sum())
    same = decoded(encode(weight, kind, importance=torch.full((256,), 3.0)), kind) - weight
    assert abs(float(same.square().sum()) / float(plain.square().sum()) - 1) < 1e-3


@pytest.mark.parametrize("kind", ENCODERS)
def test_blocks_that_are_decoded_and_encoded_again_stay_near(kind):
    values = decoded(load_file(BLOCKS)[f"{kind}.blocks"], kind)
    again = decoded(encode(values, kind), kind)
    bounds = {"2": 0.2, "3": 0.1, "4": 0.06, "5": 0.03, "6": 0.02, "8": 0.005}
    assert float((again - values).norm() / values.norm()) < bounds[kind.removeprefix("I")[1]]


@pytest.mark.parametrize("kind", ENCODERS)
def test_zeros_and_constant_rows_are_exact(kind):
    values = torch.zeros(3, 256)
    values[1] = 0.5
    values[2, 7] = -2.0
    assert torch.equal(decoded(encode(values, kind), kind)[0], values[0])
    # The table of IQ4 has no 0, only 1/127 of its largest number.
    near = 2 / 113 if kind.startswith("IQ4") else 2e-3
    torch.testing.assert_close(decoded(encode(values, kind), kind), values, rtol=2e-3, atol=near)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_are_stored_as_they_are(kind):
    values = torch.randn(2, 5).bfloat16()
    stored = decoded(encode(values, kind), kind)
    assert torch.equal(stored, values.to(stored.dtype))


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(AiakqError, match="blk.0"):
        encode(torch.tensor([[torch.nan] * 32]), "Q4_0", "blk.0")
    with pytest.raises(AiakqError, match="blk.0"):
        encode(torch.tensor([[1e9] * 32]), "F16", "blk.0")
    with pytest.raises(AiakqError, match="blk.0"):
        encode(torch.tensor([[1e9] * 32]), "Q4_0", "blk.0")


# --- quantized weights ------------------------------------------------------------------------------------------------


def weight(bits: int, group: int, zeros: bool = False, scales: torch.dtype = torch.float16) -> QWeight:
    make = torch.Generator().manual_seed(bits)
    shape = (6, 128 // group)
    return QWeight(
        scheme=f"w{bits}a16",
        codes=torch.randint(0, 2**bits, (6, 128), generator=make).to(torch.uint8),
        scales=(torch.rand(shape, generator=make) * 0.02 + 0.001).half().to(scales),
        zeros=torch.randint(0, 2**bits, shape, generator=make).to(torch.uint8) if zeros else None,
        group_size=group,
    )


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_0"), (5, "Q5_0"), (8, "Q8_0")])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_symmetric_weights_are_written_without_loss(bits, kind, group):
    given = weight(bits, group)
    found = exact_blocks(given)
    assert found is not None
    assert found[0] == kind
    read = read_weight(found[1], KINDS[NUMBERS[kind]], "linear")
    assert torch.equal(read.codes, given.codes)
    assert torch.equal(values_of(read), values_of(given))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_that_were_read_are_written_as_they_were(kind):
    blocks = load_file(BLOCKS)[f"{kind}.blocks"]
    found = exact_blocks(read_weight(blocks, KINDS[NUMBERS[kind]], "linear"))
    assert found is not None
    assert found[0] == kind
    assert torch.equal(found[1], blocks)


def test_zero_points_are_written_where_their_products_are_exact():
    given = weight(4, 32, zeros=True)
    given.scales = (2.0 ** torch.arange(24).view(6, 4).sub(12).clamp(-10, 3)).half()
    found = exact_blocks(given)
    assert found is not None
    assert found[0] == "Q4_1"
    assert torch.equal(decoded(found[1], "Q4_1"), values_of(given))
    given.scales = given.scales * 1.123
    assert exact_blocks(given) is None


def test_weights_that_blocks_cannot_hold_are_not_written():
    rounded = weight(4, 32, scales=torch.float32)
    rounded.scales = rounded.scales * (1 + 1e-5)
    assert exact_blocks(rounded) is None
    assert exact_blocks(weight(4, 16)) is None
    assert exact_blocks(weight(3, 32)) is None
    permuted = weight(4, 32)
    permuted.perm = torch.arange(128)
    assert exact_blocks(permuted) is None
