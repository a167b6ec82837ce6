"""``quantization_config``: what cannot be read is refused, names are looked up, and tensors overrule it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.spec import LayerSpec, QuantSpec


def group(bits: int) -> dict[str, Any]:
    """A group of compressed-tensors for every linear."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
    return {"targets": ["Linear"], "weights": weights}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "Marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "Marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "marlin"}, "Marlin"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "bitblas"}, "BitBLAS"),
        ({"quant_method": "bitblas", "bits": 4}, "BitBLAS"),
        ({"quant_method": "exl2", "bits": 4.65}, "ExLlamaV2"),
        ({"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_p"}, "bit planes"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {"bits": 5}}}, "5 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["x"]}, "dynamic"),
        ({"quant_method": "gptq", "bits": [4]}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "32"}, "group_size"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "target"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": group(5)},
                "format": "pack-quantized",
            },
            "5",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": group(4)},
                "transform_config": {"config_groups": {"R1": {}}},
            },
            "rotations",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_unsupported_configs_are_refused_in_one_line(config, said):
    with pytest.raises(AiakqError) as caught:
        quantization_config.read(config)
    assert caught.value.id == "format_unsupported" and said in str(caught.value) and "\n" not in str(caught.value)


def test_many_names_are_found_by_lookup():
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(60) for expert in range(250)]
    layers = tuple((name, LayerSpec(8, -1)) for name in names[1::2])
    spec = QuantSpec("gptq", "compressed-tensors", 4, 32, ignore=tuple(names[::2]), layers=layers)
    assert all(spec.for_layer(name) is None for name in names[::2])
    assert all(spec.for_layer(name).bits == 8 for name in names[1::2])


def test_the_layout_comes_from_the_tensors(tmp_path, random_weight):
    """GPTQModel's rounding is GPTQ by name and AWQ by layout; the config may say anything."""
    spec = QuantSpec("awq", "awq", 4, 32, symmetric=False)
    weight = random_weight("w4a16")
    for layout in ("gptq", "awq", "awq_gemv"):
        folder = tmp_path / layout
        folder.mkdir()
        written = formats.load(layout).write(weight, replace(spec, format=layout), torch.float16)
        save_file({f"x.{name}": tensor for name, tensor in written.items()}, folder / "model.safetensors")
        for config in (
            {"quant_method": "gptq", "format": "gemm", "bits": 4, "group_size": 32, "sym": True},
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
            {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32},
            {"quant_method": "awq", "version": "llm-awq", "w_bit": 4, "q_group_size": 32},
        ):
            (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
            read = Checkpoint.open(folder).read_linear("x")
            assert torch.equal(read.codes, weight.codes) and read.zeros is None
