"""HQQ: damaged tensors and configs that are refused; test_interop.py reads what hqq wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.formats import hqq, quantization_config
from aiakq.formats.decoded_weight import DecodedWeight, as_floats
from aiakq.kernels.types import QWeight


def config(**changes: Any) -> dict[str, Any]:
    values = {"nbits": 4, "group_size": 16, "axis": 1, "channel_wise": True, **changes}
    return {"quant_method": "hqq", "quant_config": {"weight_quant_params": values}}


def stored() -> dict[str, Tensor]:
    """4 x 32 codes in 8 groups of 16, the first four in the high bits."""
    return {
        "W_q": torch.arange(64, dtype=torch.uint8).view(4, 16) * 3,
        "scale": torch.arange(1.0, 9)[:, None].half(),
        "zero": torch.full((8, 1), 1.5).half(),
        "shape": torch.tensor([4, 32]),
        "nbits": torch.tensor(4, dtype=torch.int32),
        "axis": torch.tensor(1, dtype=torch.int32),
    }


SPEC = quantization_config.read(config())


def test_groups_of_rows_keep_their_codes() -> None:
    weight = hqq.read(stored(), SPEC)
    assert isinstance(weight, QWeight) and (weight.scheme, weight.group_size) == ("w4a16", 16)
    words = torch.arange(64).view(4, 16) * 3
    codes = torch.cat((words >> 4, words & 15)).float()
    assert torch.equal(as_floats(weight), ((codes - 1.5) * torch.arange(1.0, 9)[:, None]).view(4, 32))


def test_groups_across_outputs_are_decoded() -> None:
    tensors = stored() | {"W_q": torch.zeros(8, 8, dtype=torch.uint8), "axis": torch.tensor(0, dtype=torch.int32)}
    tensors |= {name: tensors[name].T for name in ("scale", "zero")}
    weight = hqq.read(tensors, SPEC)
    assert isinstance(weight, DecodedWeight) and "axis 0" in weight.reason
    assert torch.equal(weight.values, (-1.5 * torch.arange(1.0, 9)).repeat(16).view(4, 32))


@pytest.mark.parametrize(
    ("suffix", "value"),
    [
        ("shape", torch.tensor([4, -32])),
        ("shape", torch.tensor([2**40, 2**40])),
        ("nbits", torch.tensor(7)),
        ("nbits", torch.tensor(float("inf"))),
        ("axis", torch.tensor(2)),
        ("scale", torch.ones(0, 1)),
        ("scale", torch.full((8, 1), torch.nan)),
        ("zero", torch.ones(4, 1)),
        ("W_q", torch.zeros(3, 16, dtype=torch.uint8)),
        ("W_q", torch.zeros(4, 8, dtype=torch.uint8)),
    ],
    ids=lambda value: str(value)[:30],
)
def test_damaged_tensors_are_refused(suffix: str, value: Tensor) -> None:
    with pytest.raises(AiakqError) as caught:
        hqq.read({**stored(), suffix: value}, SPEC)
    assert caught.value.id in ("tensor_mismatch", "not_finite")


@pytest.mark.parametrize("changes", [{"nbits": 7}, {"nbits": "x"}, {"unknown": 1}, {"group_size": "x"}], ids=str)
def test_other_configs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(AiakqError) as caught:
        quantization_config.read(config(**changes))
    assert caught.value.id == "format_unsupported"


def test_quantized_scales_are_refused() -> None:
    settings = config()
    settings["quant_config"]["scale_quant_params"] = {"nbits": 8}
    with pytest.raises(AiakqError, match="quantized scales"):
        quantization_config.read(settings)
