"""AWQ on disk: words written by hand, and layers that are left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats import awq, quantization_config
from aiakq.kernels.types import QWeight
from aiakq.spec import LayerSpec, QuantSpec

DOWN = "model.layers.0.mlp.down_proj"


def test_awq_words_written_by_hand(as_words: Callable[[torch.Tensor], list[str]]) -> None:
    codes = torch.arange(8, dtype=torch.uint8).reshape(8, 1).repeat(1, 32)
    weight = QWeight("w4a16", codes, torch.ones(8, 1), zeros=torch.arange(8, 16, dtype=torch.uint8).reshape(8, 1))
    tensors = formats.load("awq").write(weight, QuantSpec("gptq", "awq", 4, symmetric=False), torch.float16)
    assert as_words(tensors["qweight"][0]) == ["75316420"]
    assert as_words(tensors["qzeros"]) == ["fdb9eca8"]


@pytest.mark.parametrize("chunk", [1, 70, 1 << 17])
def test_words_are_unpacked_some_at_a_time(
    chunk: int, random_weight: Callable[..., QWeight], same_weight: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awq, "_CHUNK", chunk)
    weight, spec = random_weight("w4a16", zeros=True), QuantSpec("awq", "awq", 4, 32, symmetric=False)
    same_weight(awq.read(awq.write(weight, spec, torch.float16), spec), weight)


def test_awq_lists_hold_parts_of_names():
    config = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["gate", "visual", "layers.10."]}
    spec = quantization_config.read(config)
    for name in ("model.layers.0.mlp.gate", "visual.blocks.1.fc", "model.layers.0.mlp.gate_proj", "layers.10.x"):
        assert spec.for_layer(name) is None
    assert spec.for_layer("model.layers.1.mlp.up_proj").bits == 4
    assert quantization_config.read(quantization_config.write(spec)).ignore == spec.ignore
    left_out = QuantSpec("gptq", "awq", 4, 32, ignore=("lm_head",), layers=((DOWN, None),))
    assert quantization_config.write(left_out)["modules_to_not_convert"] == ["lm_head", DOWN]
    with pytest.raises(AiakqError) as caught:
        quantization_config.write(QuantSpec("gptq", "awq", 4, 32, layers=((DOWN, LayerSpec(8, -1)),)))
    assert caught.value.id == "option_conflict"
