"""Layers that the config says are quantized and are not, or the reverse, are remarked upon; the tensors count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.contradictions import contradictions
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.inspect.inspection import inspect_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"


def changed(tmp_path: Path, name: str, **changes: Any) -> Path:
    folder = tmp_path / name
    shutil.copytree(FIXTURES / name, folder)
    (folder / "expected.safetensors").unlink()
    if changes:
        config = json.loads((folder / "config.json").read_text())
        config.setdefault("quantization_config", {"quant_method": "quanto", "weights": "int8"}).update(changes)
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def remarks(folder: Path) -> list[str]:
    return list(contradictions(Checkpoint.open(folder)))


@pytest.mark.parametrize("name", ["ao-int8", "quanto-int8", "vptq"])
def test_a_skipped_layer_that_is_quantized_is_named(tmp_path: Path, name: str) -> None:
    skipped = ["model.layers.0.mlp.up_proj"]
    [remark] = remarks(changed(tmp_path, name, modules_to_not_convert=skipped))
    assert remark.startswith("the config says that model.layers.0.mlp.up_proj is not quantized, but the tensors are")


def test_a_listed_layer_that_is_not_quantized_is_named(tmp_path: Path) -> None:
    """In quanto_qmap.json."""
    folder = changed(tmp_path, "quanto-int8")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj"
    parts = [f"{name}.weight._data", f"{name}.weight._scale"]
    tensors[f"{name}.weight"] = tensors[parts[0]].float() * tensors[parts[1]]
    save_file({key: each for key, each in tensors.items() if key not in parts}, folder / "model.safetensors")
    [remark] = remarks(folder)
    assert remark.startswith(f"the config says that {name} is quantized, but the tensors are not, and count")


def test_layers_of_vptq_and_modelopt_that_are_plain_or_not_there_are_named(tmp_path: Path) -> None:
    folder, name, absent = changed(tmp_path, "vptq"), "model.layers.0.mlp.up_proj", "model.layers.7.mlp.up_proj"
    path, quantization = folder / "config.json", "quantization_config"
    config, tensors = json.loads(path.read_text()), load_file(folder / "model.safetensors")
    entries = config[quantization]["config_for_layers"]
    entries[absent] = entries[name]
    path.write_text(json.dumps(config))
    [remark] = remarks(folder)
    assert remark == f"the config says how {absent} is quantized, which has no tensors"
    kept = {key: each for key, each in tensors.items() if not key.startswith(name)}
    save_file({**kept, f"{name}.weight": torch.ones(96, 64)}, folder / "model.safetensors")
    assert remarks(folder)[0] == f"the config says that {name} is quantized, but the tensors are not, and count"
    listed = {each: {"quant_algo": "FP8"} for each in (name, absent)}
    config[quantization] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    path.write_text(json.dumps(config))
    others = {key: each for key, each in kept.items() if "layers.0" not in key}
    save_file({**others, f"{name}.weight": torch.ones(96, 64)}, folder / "model.safetensors")
    plain, missing = remarks(folder)
    assert plain.startswith(f"the config says that {name} is quantized, but") and absent in missing


def test_a_coded_layer_that_a_config_of_several_kinds_leaves_out_is_refused(tmp_path: Path) -> None:
    """Its activations could be rounded as those of either kind."""
    listed = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    tensors: dict[str, torch.Tensor] = {}
    for name in "abc":
        tensors[f"{name}.weight"] = torch.ones(2, 4).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale"] = torch.ones(2, 1) if name == "b" else torch.ones(())
        tensors |= {f"{name}.input_scale": torch.ones(())} if name != "b" else {}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    for is_listed in (False, True):
        if is_listed:
            listed["c"] = listed["a"]
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        checkpoint = Checkpoint.open(tmp_path)
        if is_listed:
            assert checkpoint.read_linear("c").scheme == "fp8a8"
            continue
        with pytest.raises(AiakqError, match="a config that leaves out c, which is quantized"):
            checkpoint.read_linear("c")


@pytest.mark.parametrize("folder", sorted(path.parent for path in FIXTURES.glob("*/config.json")), ids=lambda f: f.name)
def test_files_of_other_tools_agree_with_their_configs(folder: Path) -> None:
    assert not remarks(folder)


def test_loading_and_inspecting_say_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = changed(tmp_path, "ao-int8", modules_to_not_convert=["up_proj"])
    assert any("up_proj is not quantized" in remark for remark in inspect_checkpoint(str(folder)).remarks)
    load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    assert "up_proj is not quantized, but the tensors are" in caplog.text


@pytest.mark.parametrize(
    ("name", "changes", "suffix"),
    [
        ("mo-w4a8-awq", {"quant_algo": "W4A16_AWQ"}, "weight_scale_2"),
        ("mo-w4a8-awq", {"quant_algo": "W4A16_AWQ"}, "input_scale"),
        ("lc-mxfp4", {}, "weight_global_scale"),
        ("lc-w8a16", {}, "input_scale"),
        ("vptq", {}, "res_indices"),
    ],
)
def test_a_tensor_that_the_config_has_no_place_for_is_refused(tmp_path, name, changes, suffix):
    """A second scale that nobody multiplies by would change every output."""
    folder, linear = changed(tmp_path, name, **changes), "model.layers.0.mlp.up_proj"
    (folder / "hf_quant_config.json").unlink(missing_ok=True)  # it says what the config said before
    tensors = load_file(folder / "model.safetensors")
    one = tensors.get(f"{linear}.{suffix}", torch.ones(1))
    kept = {name: tensor for name, tensor in tensors.items() if f"{linear}." not in name or "_scale_2" not in name}
    save_file({**kept, f"{linear}.{suffix}": one}, folder / "model.safetensors")
    with pytest.raises(AiakqError, match="is there, and the config says that it is not"):
        Checkpoint.open(folder).read_linear(linear)
    config = EngineConfig.from_args({"model": str(folder), "dtype": "float32", "device": "cpu"})
    with pytest.raises(AiakqError, match=f"{linear}.{suffix}"):
        load_model(config)
