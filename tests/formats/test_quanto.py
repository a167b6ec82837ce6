"""optimum-quanto: what is refused; test_interop.py reads what it wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.formats import quantization_config, quanto


@pytest.mark.parametrize(
    "entry",
    [{"weights": "qint4"}, {"weights": "qint8", "activations": "qint8"}, {"weights": "qint8", "more": 1}],
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
