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
    tensors = load_file(folder / "model.safetensors")
    one = tensors.get(f"{linear}.{suffix}", torch.ones(1))
    kept = {name: tensor for name, tensor in tensors.items() if f"{linear}." not in name or "_scale_2" not in name}
    save_file({**kept, f"{linear}.{suffix}": one}, folder / "model.safetensors")
    with pytest.raises(AiakqError, match="is there, and the config says that it is not"):
        Checkpoint.open(folder).read_linear(linear)
    config = EngineConfig.from_args({"model": str(folder), "dtype": "float32", "device": "cpu"})
    with pytest.raises(AiakqError, match=f"{linear}.{suffix}"):
        load_model(config)
