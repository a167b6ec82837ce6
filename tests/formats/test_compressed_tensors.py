"""compressed-tensors on disk: words written by hand, and checkpoints whose layers differ, which transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from aiakq import formats
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


def test_compressed_tensors_words_written_by_hand(as_words: Callable[[torch.Tensor], list[str]]) -> None:
    codes = torch.tensor([[0, 127, 128, 255]], dtype=torch.uint8)  # -128, -1, 0, 127
    module = formats.load("compressed-tensors")
    tensors = module.write(
        QWeight("w8a16", codes, torch.ones(1, 1)), QuantSpec("gptq", "compressed-tensors", 8), torch.bfloat16
    )
    assert as_words(tensors["weight_packed"]) == ["ff807f00"]
    assert tensors["weight_shape"].tolist() == [1, 4]
    assert tensors["weight_scale"].dtype == torch.bfloat16
    spec = QuantSpec("gptq", "compressed-tensors", 8, activation_bits=8)
    tensors = module.write(QWeight("w8a8", codes, torch.ones(1, 1)), spec, torch.bfloat16)
    assert tensors["weight"].tolist() == [[-128, -1, 0, 127]]
    assert tensors["weight_scale"].dtype == torch.float32


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
def test_written_configs_are_read_back(name):
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
