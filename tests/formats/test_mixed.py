"""Checkpoints whose layers differ: what is said about them in config.json, both ways, and who reads them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiakq import formats
from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import load_for_scoring
from aiakq.formats import quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.model_folder import INDEX
from aiakq.kernels.types import QWeight
from aiakq.spec import LayerSpec, QuantSpec

W4 = LayerSpec(4, 32)
W8 = LayerSpec(8, -1)
W8G = LayerSpec(8, 32)
W8A8 = LayerSpec(8, -1, activation_bits=8)
LINEARS = [
    f"model.layers.{layer}.{name}"
    for layer in range(2)
    for name in (
        *(f"self_attn.{letter}_proj" for letter in "qkvo"),
        *(f"mlp.{which}_proj" for which in ("gate", "up", "down")),
    )
]
DOWN = "model.layers.0.mlp.down_proj"


def spec_of(format: str = "compressed-tensors", base: LayerSpec = W4, **fields: Any) -> QuantSpec:
    return QuantSpec("gptq", format, **vars(base), **fields)


def rounded(weight: torch.Tensor, spec: QuantSpec) -> QWeight:
    """The plainest rounding: symmetric, by the largest value of each group."""
    n, k = weight.shape
    group = k if spec.group_size == -1 else spec.group_size
    half = 2 ** (spec.bits - 1)
    parts = weight.float().view(n, k // group, group)
    scales = (parts.abs().amax(-1) / (half - 1)).half().float()
    codes = (parts / scales.unsqueeze(-1)).round().clamp(-half, half - 1) + half
    return QWeight(spec.scheme, codes.view(n, k).to(torch.uint8), scales, group_size=group)


def save_mixed(source: Path, folder: Path, spec: QuantSpec) -> Path:
    """The model in ``source`` with every linear stored as ``spec`` says of it."""
    checkpoint = Checkpoint.open(source)
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copy(path, folder / path.name)
    tensors = {}
    for name in checkpoint.inventory:
        prefix = name.removesuffix(".weight")
        own = spec.for_layer(prefix) if prefix in (*LINEARS, "lm_head") else None
        if own is None:
            tensors[name] = checkpoint.tensor(name)
        else:
            weight = rounded(checkpoint.tensor(name), own)
            written = formats.load(own.format).write(weight, own, torch.float32)
            tensors |= {f"{prefix}.{suffix}": tensor for suffix, tensor in written.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**checkpoint.config, "quantization_config": quantization_config.write(spec)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


#: name -> spec of the compressed-tensors files that transformers must load.
MIXED = {
    "two widths": spec_of(layers=((DOWN, W8), ("model.layers.1.self_attn.o_proj", W8G))),
    "one left out": spec_of(ignore=("lm_head", DOWN)),
    "one left out by a layer entry": spec_of(layers=((DOWN, None),)),
    "head by channel": spec_of(ignore=(), layers=(("lm_head", W8),)),
    "head by group": spec_of(ignore=(), layers=(("lm_head", W8G), (DOWN, None))),
    "patterns": spec_of(layers=(("*.mlp.down_proj", W8), ("re:.*\\.1\\.mlp\\.(gate|up)_proj", W8G))),
    "two formats": spec_of(layers=tuple((f"model.layers.1.mlp.{name}_proj", W8A8) for name in ("gate", "up"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_transformers_loads_mixed_files_and_gives_our_logits(tiny_model, tmp_path, name):
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    spec = MIXED[name]
    folder = save_mixed(tiny_model("LlamaForCausalLM"), tmp_path / "model", spec)
    ids = torch.arange(3, 60).unsqueeze(0)
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.inference_mode():
        theirs = model.eval()(ids).logits
    ours = load_for_scoring(folder, "float32", "cpu").logits(ids)
    # A last bit before 8-bit activations may become a whole step of them.
    assert ((ours - theirs).norm() / theirs.norm()).item() < (2e-2 if "formats" in name else 1e-5)


@pytest.mark.parametrize("name", MIXED)
def test_what_is_written_is_read_again(name):
    spec = MIXED[name]
    again = quantization_config.read(json.loads(json.dumps(quantization_config.write(spec))))
    for linear in (*LINEARS, "lm_head"):
        own, read = spec.for_layer(linear), again.for_layer(linear)
        assert (own is None) == (read is None)
        if own is not None and read is not None:
            assert own.layer == read.layer


def test_groups_of_a_mixed_config():
    config = quantization_config.write(MIXED["two formats"])
    assert config["format"] == "mixed-precision" and config["ignore"] == ["lm_head"]
    first, last = config["config_groups"].values()
    assert (first["format"], last["format"]) == ("int-quantized", "pack-quantized")
    assert first["targets"] == ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
    assert last["targets"] == ["Linear"]
    assert quantization_config.write(MIXED["two widths"])["format"] == "pack-quantized"


def test_many_names_are_looked_up_not_tried():
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(60) for expert in range(250)]
    spec = spec_of(ignore=tuple(names[::2]), layers=tuple((name, W8) for name in names[1::2]))
    assert all(spec.for_layer(name) is None for name in names[::2])
    assert all(spec.for_layer(name).bits == 8 for name in names[1::2])


# --- GPTQ ------------------------------------------------------------------------------------------------------------


def test_gptq_says_it_with_dynamic():
    spec = spec_of(
        "gptq", ignore=("lm_head", DOWN), layers=(("model.layers.1.self_attn.q_proj", W8G), ("*.up_proj", W8))
    )
    config = quantization_config.write(spec)
    assert config["lm_head"] is False
    assert list(config["dynamic"]) == [
        r"-:^model\.layers\.0\.mlp\.down_proj$",
        r"+:^model\.layers\.1\.self_attn\.(q_proj|qkv_proj)$",
        r"+:^.*\.up_proj$",
    ]
    again = quantization_config.read(config)
    assert again.for_layer(DOWN) is None and again.for_layer("lm_head") is None
    assert again.for_layer("model.layers.1.self_attn.q_proj").layer == W8G
    assert again.for_layer("model.layers.1.self_attn.qkv_proj").layer == W8G  # vLLM's name for three in one
    assert again.for_layer("model.layers.1.self_attn.o_proj").layer == W4
    head = quantization_config.read(quantization_config.write(replace(spec, ignore=(), layers=(("lm_head", W8),))))
    assert head.for_layer("lm_head").bits == 8


@pytest.mark.slow
def test_gptqmodel_reads_dynamic(tiny_model, tmp_path):
    """GPTQModel's own rules give each layer what ours give it."""
    pytest.importorskip("gptqmodel")
    from gptqmodel.quantization.config import dynamic_get

    spec = spec_of("gptq", ignore=("lm_head", DOWN), layers=(("model.layers.1.self_attn.q_proj", W8G),))
    dynamic = quantization_config.write(spec)["dynamic"]
    assert dynamic_get(dynamic, DOWN) is False
    assert dynamic_get(dynamic, "model.layers.1.self_attn.q_proj", "bits", 4) == 8
    assert dynamic_get(dynamic, "model.layers.0.self_attn.q_proj", "bits", 4) == 4


def test_first_dynamic_rule_wins():
    dynamic = {r"-:.*down.*": {}, r"+:.*\.1\..*": {"bits": 8, "sym": False}, r".*up.*": {"group_size": 128}}
    spec = quantization_config.read(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "dynamic": dynamic}
    )
    assert spec.for_layer("model.layers.1.mlp.down_proj") is None
    assert spec.for_layer("model.layers.1.mlp.up_proj").layer == LayerSpec(8, 32, symmetric=False)
    assert spec.for_layer("model.layers.0.mlp.up_proj").layer == LayerSpec(4, 128)
    assert spec.for_layer("model.layers.0.mlp.gate_proj").layer == LayerSpec(4, 32)


# --- AWQ, AutoRound, compressed-tensors of other tools --------------------------------------------------------------


def test_awq_lists_hold_parts_of_names():
    config = {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["gate", "visual", "layers.10."]}
    spec = quantization_config.read(config)
    for name in ("model.layers.0.mlp.gate", "visual.blocks.1.fc", "model.layers.0.mlp.gate_proj", "layers.10.x"):
        assert spec.for_layer(name) is None
    assert spec.for_layer("model.layers.1.mlp.up_proj").bits == 4
    assert quantization_config.read(quantization_config.write(spec)).ignore == spec.ignore
    left_out = spec_of("awq", ignore=("lm_head",), layers=((DOWN, None),))
    assert quantization_config.write(left_out)["modules_to_not_convert"] == ["lm_head", DOWN]
    with pytest.raises(AiakqError) as caught:
        quantization_config.write(spec_of("awq", layers=((DOWN, W8),)))
    assert caught.value.id == "option_conflict"


def test_autoround_extra_config():
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {
            "lm_head": {"bits": 8, "group_size": 128},
            DOWN: {"bits": 16, "data_type": "float"},
            r"layers\.1\.mlp\..*": {"bits": 8, "sym": False},
        },
    }
    spec = quantization_config.read({**config, "lm_head": True})
    assert spec.for_layer("lm_head").layer == LayerSpec(8, 128)
    assert spec.for_layer(DOWN) is None
    assert spec.for_layer("model.layers.1.mlp.up_proj").layer == LayerSpec(8, 32, symmetric=False)
    assert spec.for_layer("model.layers.0.mlp.up_proj").layer == W4


def group(targets: list[str], bits: int = 4, size: int | None = 32, **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group" if size else "channel", "group_size": size}
    return {"targets": targets, "weights": weights, **fields}


def test_compressed_tensors_precedence():
    """Names before regular expressions before the class, whatever the order of the groups."""
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "a": group(["Linear"], format="pack-quantized"),
            "b": group(["re:.*down_proj$", "re:.*o_proj"], 8, None, format="pack-quantized"),
            "c": group([DOWN], 8, 32, format="pack-quantized"),
        },
        "ignore": ["lm_head", "re:.*gate$"],
    }
    spec = quantization_config.read(config)
    assert spec.for_layer(DOWN).layer == W8G
    assert spec.for_layer("model.layers.1.mlp.down_proj").layer == W8
    assert spec.for_layer("model.layers.1.mlp.up_proj").layer == W4
    assert spec.for_layer("model.layers.1.mlp.gate") is None
    del config["config_groups"]["a"]
    spec = quantization_config.read(config)
    assert spec.for_layer("model.layers.1.mlp.up_proj") is None and spec.for_layer(DOWN).layer == W8G


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
                "config_groups": {"a": group(["Linear"], 5)},
                "format": "pack-quantized",
            },
            "5",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": group(["Linear"])},
                "transform_config": {"config_groups": {"R1": {}}},
            },
            "rotations",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_read_is_refused_in_one_line(config, said):
    with pytest.raises(AiakqError) as caught:
        quantization_config.read(config)
    assert caught.value.id == "format_unsupported" and said in str(caught.value) and "\n" not in str(caught.value)


def test_the_layout_is_the_tensors_own(tmp_path):
    """GPTQModel's rounding is GPTQ by name and AWQ by layout; the config may say anything."""
    spec = QuantSpec("awq", "awq", 4, 32, symmetric=False)
    weight = rounded(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)), replace(spec, symmetric=True))
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
