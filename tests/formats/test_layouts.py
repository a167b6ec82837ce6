"""Every on-disk layout: a round trip keeps every tensor, and damage is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats import quantization_config
from aiakq.kernels.types import QWeight
from aiakq.spec import QuantSpec
from tests.format_names import INTEGERS

CASES = [
    *(("gptq", f"w{bits}a16", {}) for bits in (2, 3, 4, 8)),
    ("gptq", "w4a16", {"zeros": True}),
    *(("gptq_v2", f"w{bits}a16", {"zeros": True}) for bits in (2, 3, 4, 8)),
    ("gptq", "w4a16", {"group": 96}),
    ("awq", "w4a16", {"zeros": True}),
    ("awq", "w4a16", {"group": 96}),
    ("awq_gemv", "w4a16", {"zeros": True}),
    ("awq_gemv", "w4a16", {"group": 64, "k": 1024}),
    ("awq_gemv", "w4a16", {"zeros": True, "group": 128, "k": 1280}),
    ("awq_gemv_fast", "w4a16", {"zeros": True, "k": 128}),
    ("awq_gemv_fast", "w4a16", {"zeros": True, "group": 128, "k": 1280}),
    ("awq_gemv_fast", "w4a16", {"group": 64, "k": 192, "n": 20}),
    ("compressed-tensors", "w8a16", {"group": 96}),
    ("compressed-tensors", "w3a16", {"zeros": True}),
    ("compressed-tensors", "w2a16", {}),
    ("compressed-tensors", "w8a16", {}),
    ("compressed-tensors", "w4a16", {"zeros": True}),
    ("compressed-tensors", "w4a16", {"zeros": True, "n": 20, "k": 70, "group": 14}),
    ("compressed-tensors", "w8a8", {"group": 96}),
]


@pytest.mark.parametrize(("format", "scheme", "fields"), CASES)
def test_write_then_read_is_the_same_weight(
    format: str,
    scheme: str,
    fields: dict[str, Any],
    random_weight: Callable[..., QWeight],
    same_weight: Callable[[QWeight, QWeight], None],
) -> None:
    weight = random_weight(scheme, **fields)
    groups = weight.scales.shape[1]
    spec = QuantSpec(
        "gptq",
        format,
        weight.bits,
        group_size=weight.group_size if groups > 1 else -1,
        symmetric=weight.zeros is None,
        activation_bits=8 if scheme == "w8a8" else None,
    )
    module = formats.load(format)
    tensors = module.write(weight, spec, torch.float16)
    assert set(tensors) <= set(module.SUFFIXES)
    same_weight(module.read(tensors, spec), weight)
    # The config that goes with it leads to the same reading.
    again = quantization_config.read(json.loads(json.dumps(quantization_config.write(spec))))
    same_weight(module.read(tensors, again), weight)


def damaged(tensors: dict[str, torch.Tensor], suffix: str, change: Any) -> dict[str, torch.Tensor]:
    result = dict(tensors)
    result[suffix] = change(result[suffix].clone())
    return result


def poke(value: Any) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("format", "suffix", "change", "id"),
    [
        ("gptq", "g_idx", poke(-1), "tensor_mismatch"),
        ("gptq", "g_idx", poke(3), "tensor_mismatch"),
        ("gptq", "g_idx", poke(1), "tensor_mismatch"),  # a group with 33 channels
        ("gptq", "scales", poke(float("nan")), "not_finite"),
        ("gptq", "scales", lambda t: t[:, :-1], "tensor_mismatch"),
        ("gptq", "qweight", lambda t: t[:-1], "tensor_mismatch"),
        ("gptq", "qweight", lambda t: t.float(), "tensor_mismatch"),
        ("gptq", "qzeros", lambda t: t[:, :-1], "tensor_mismatch"),
        ("gptq", "bias", lambda t: t[:-1], "tensor_mismatch"),
        ("gptq", "bias", poke(float("inf")), "not_finite"),
        ("awq", "scales", poke(float("inf")), "not_finite"),
        ("awq", "qweight", lambda t: t[:, :-1], "tensor_mismatch"),
        ("awq", "qzeros", lambda t: t[:-1], "tensor_mismatch"),
        ("awq", "scales", lambda t: t[:0], "tensor_mismatch"),
        ("compressed-tensors", "weight_shape", poke(63), "tensor_mismatch"),
        ("compressed-tensors", "weight_shape", lambda t: -t, "tensor_mismatch"),
        ("compressed-tensors", "weight_scale", poke(float("nan")), "not_finite"),
        ("compressed-tensors", "weight_packed", lambda t: t[:, :-1], "tensor_mismatch"),
    ],
)
def test_damage_is_refused_by_name(
    format: str, suffix: str, change: Any, id: str, random_weight: Callable[..., QWeight]
) -> None:
    module = formats.load(format)
    spec = QuantSpec("gptq", format, 4, group_size=32)
    tensors = module.write(random_weight("w4a16"), spec, torch.float16)
    with pytest.raises(AiakqError) as caught:
        module.read(damaged(tensors, suffix, change), spec, "model.layers.3.q_proj")
    assert caught.value.id == id
    assert "model.layers.3.q_proj." in str(caught.value)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_missing_tensor_is_refused(name: str, random_weight: Callable[..., QWeight]) -> None:
    module = formats.load(name)
    spec = QuantSpec("gptq", name, 4, group_size=32, symmetric=False)
    tensors = module.write(random_weight("w4a16", zeros=True, k=128), spec, torch.float16)
    for suffix in set(tensors) - {"bias", "g_idx"}:
        with pytest.raises(AiakqError, match="missing|needs 3|int8") as caught:
            module.read({key: value for key, value in tensors.items() if key != suffix}, spec, "layer")
        assert caught.value.id == "tensor_mismatch"


def test_scales_that_overflow_are_refused_on_writing(random_weight: Callable[..., QWeight]) -> None:
    weight = random_weight("w4a16")
    weight.scales = weight.scales.float() * 1e6
    for name in ("gptq", "awq"):
        with pytest.raises(AiakqError) as caught:
            formats.load(name).write(weight, QuantSpec("gptq", name, 4, group_size=32), torch.float16)
        assert caught.value.id == "not_finite"
