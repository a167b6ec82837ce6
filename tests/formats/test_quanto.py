"""optimum-quanto: what is refused; test_interop.py reads what it wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.formats import quantization_config, quanto
from aiakq.formats.decoded_weight import DecodedWeight, as_floats
from aiakq.spec import QuantSpec


@pytest.mark.parametrize(
    "entry",
    [{"weights": "qint3"}, {"weights": "qint8", "activations": "qint8"}, {"weights": "qint8", "more": 1}],
    ids=str,
)
def test_other_types_are_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(AiakqError) as caught:
        quantization_config.read({"quant_method": "quanto", "model.layers.0.mlp.up_proj": entry})
    assert caught.value.id == "format_unsupported"


def test_damaged_tensors_are_refused() -> None:
    spec = quantization_config.read({"quant_method": "quanto", "up": {"weights": "qint8", "activations": "none"}})
    tensors = {"weight._data": torch.ones(4, 8, dtype=torch.int8), "weight._scale": torch.ones(4, 1)}
    assert quanto.read(tensors, spec).scheme == "w8a16"
    for change in (
        {"weight._scale": torch.ones(3, 1)},
        {"weight._scale": torch.full((4, 1), torch.nan)},
        {"weight._data": torch.ones(4, 8).to(torch.float8_e4m3fn)},
    ):
        with pytest.raises(AiakqError):
            quanto.read({**tensors, **change}, spec)


def grouped(kind: str = "qint4") -> QuantSpec:
    spec = quantization_config.read({"quant_method": "quanto", "up": {"weights": kind, "activations": "none"}})
    return replace(spec, notes={"shape": (3, 160)})


def four_bits(dtype: torch.dtype, shift: torch.dtype) -> dict[str, Tensor]:
    """15 groups of 32 codes, of which eight rows are in the low and seven in the high bits."""
    generator = torch.Generator().manual_seed(2)
    return {
        "weight._data._data": torch.randint(0, 256, (8, 32), generator=generator).to(torch.uint8),
        "weight._scale": torch.rand(15, 1, generator=generator).to(dtype),
        "weight._shift": (torch.rand(15, 1, generator=generator) * 7).to(shift),
    }


@pytest.mark.parametrize("shift", [torch.float32, torch.uint8, torch.bfloat16], ids=str)
def test_four_bits_are_in_groups(shift: torch.dtype) -> None:
    """Sixteen bits are decoded as quanto does, with products that are rounded before shifts are subtracted."""
    dtype = shift if shift.is_floating_point else torch.float32
    tensors = four_bits(dtype, shift)
    weight = quanto.read(tensors, grouped())
    assert isinstance(weight, DecodedWeight) == (shift == torch.bfloat16)
    packed = tensors["weight._data._data"]
    codes = torch.cat((packed & 15, packed >> 4))[:15]
    scale, moved = tensors["weight._scale"], tensors["weight._shift"]
    expected = codes * scale - moved if shift.is_floating_point else (codes.float() - moved) * scale
    assert torch.equal(as_floats(weight, dtype), expected.view(3, 160))


@pytest.mark.parametrize(
    "change",
    [
        {"weight._data._data": torch.zeros(8, 64, dtype=torch.uint8)},
        {"weight._scale": torch.ones(3, 1)},
        {"weight._scale": torch.full((15, 1), torch.nan)},
        {"weight._shift": torch.full((15, 1), torch.inf)},
        {"weight._shift": torch.full((15, 1), 16, dtype=torch.uint8)},
    ],
    ids=lambda value: str(value)[:40],
)
def test_damaged_groups_are_refused(change: dict[str, Tensor]) -> None:
    with pytest.raises(AiakqError):
        quanto.read({**four_bits(torch.float32, torch.float32), **change}, grouped())


def test_groups_need_the_shape_of_the_model() -> None:
    with pytest.raises(AiakqError, match="nothing says the shape"):
        quanto.read(four_bits(torch.float32, torch.float32), replace(grouped(), notes={}))
