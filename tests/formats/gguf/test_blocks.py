"""Every kind of blocks has the values of ggml, bit for bit: stored ones, and those of the gguf package if present."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aiakq.errors import AiakqError
from aiakq.formats.gguf.blocks import LAYOUTS
from aiakq.formats.gguf.decoding import read_floats, read_weight
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.kernels.ops.linear_reference import dequantize

#: Random blocks of every kind, and what gguf-py 0.19 decodes them to.
STORED = Path(__file__).parents[1] / "gguf_fixtures" / "blocks.safetensors"


@pytest.fixture(scope="module")
def stored():
    return load_file(STORED)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_those_of_ggml_bit_for_bit(name, stored):
    kind, blocks, values = KINDS[NUMBERS[name]], stored[f"{name}.blocks"], stored[f"{name}.values"]
    assert torch.equal(read_floats(blocks, kind, "linear"), values)
    weight = read_weight(blocks, kind, "linear")
    assert torch.equal(dequantize(weight, torch.float32), values)
    assert int(weight.codes.max()) < 2**weight.bits
    assert (weight.group_size, weight.bits) == (LAYOUTS[name].group_size, LAYOUTS[name].bits)


@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_those_of_the_gguf_package(name, stored):
    gguf = pytest.importorskip("gguf")
    blocks = stored[f"{name}.blocks"].roll(1, dims=0)
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    assert torch.equal(read_floats(blocks, KINDS[NUMBERS[name]], "linear"), torch.from_numpy(expected))


def test_floats_keep_their_dtype_and_values():
    values = torch.randn(3, 8)
    for name, dtype in {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.items():
        rows = values.to(dtype).view(torch.uint8)
        assert torch.equal(read_floats(rows, KINDS[NUMBERS[name]], "norm"), values.to(dtype))


def test_blocks_are_decoded_to_the_dtype_that_is_asked_for(stored):
    rows, kind = stored["Q6_K.blocks"], KINDS[NUMBERS["Q6_K"]]
    assert torch.equal(read_floats(rows, kind, "e", torch.bfloat16), stored["Q6_K.values"].bfloat16())


@pytest.mark.parametrize("name", ["IQ2_XXS", "IQ3_S", "IQ1_M", "NVFP4", "Q8_K"])
def test_other_kinds_are_refused_by_name(name):
    kind = KINDS[NUMBERS[name]]
    with pytest.raises(AiakqError, match=f"blk.0.attn_q.weight is stored as {name}"):
        read_floats(torch.zeros(1, kind.nbytes, dtype=torch.uint8), kind, "blk.0.attn_q.weight")


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "MXFP4"])
def test_scales_that_are_no_numbers_are_refused(name, stored):
    rows = stored[f"{name}.blocks"].clone()
    rows[1, :2] = 255  # NaN as float16, and as a power of two
    with pytest.raises(AiakqError, match="linear.weight"):
        read_weight(rows, KINDS[NUMBERS[name]], "linear")
