"""MLX: settings of layers, kinds of models, damaged tensors; test_interop.py reads what mlx-lm wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.errors import AiakqError
from aiakq.formats import mlx, quantization_config
from aiakq.formats.checkpoint import Checkpoint
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig

FIXTURES = Path(__file__).parent / "fixtures"


def read(values: dict[str, Any]) -> Any:
    return quantization_config.read({"quant_method": "mlx", **values})


def test_layers_may_have_settings_of_their_own() -> None:
    spec = read({"group_size": 64, "bits": 4, "a": {"group_size": 32, "bits": 6}, "m.b": False, "m.c": True})
    assert spec.for_layer("a").scheme == "w6a16" and spec.for_layer("a").group_size == 32
    assert spec.for_layer("m.b") is None and spec.for_layer("m.c").scheme == spec.for_layer("d").scheme == "w4a16"


@pytest.mark.parametrize(
    "values",
    [
        {"group_size": 64, "bits": 7},
        {"group_size": -1, "bits": 4},
        {"group_size": 64, "bits": 4, "mode": "mxfp8"},
        {"group_size": 64, "bits": 4, "mode": "mxfp4"},
        {"group_size": 64, "bits": 4, "linear_class": "x"},
        {"group_size": 64, "bits": 4, "rotate_inputs": True},
        {"group_size": 64, "bits": 4, "a": {"bits": 4, "other": 1}},
    ],
    ids=str,
)
def test_other_settings_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(AiakqError) as caught:
        read(values)
    assert caught.value.id == "format_unsupported"


@pytest.mark.parametrize("kind", ["qwen3_next", [], None])
def test_models_whose_tensors_mlx_changes_are_refused(tmp_path: Path, kind: Any) -> None:
    """The norms of Qwen3-Next, say, are stored with 1 added."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / "mlx-4bit", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    with pytest.raises(AiakqError, match="renames or changes"):
        _ = Checkpoint.open(folder).spec
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"group_size": 64, "bits": 8}}))
    with pytest.raises(AiakqError, match="do not say the same"):
        _ = Checkpoint.open(folder).spec


@pytest.mark.parametrize(
    ("suffix", "value"),
    [
        ("weight", torch.zeros(4, 5, dtype=torch.int32).view(torch.uint32)),
        ("weight", torch.zeros(4, 8)),
        ("scales", torch.ones(4, 1).half()),
        ("scales", torch.full((4, 2), torch.inf).half()),
        ("biases", torch.ones(4, 3).half()),
    ],
    ids=lambda value: str(value)[:30],
)
def test_damaged_tensors_are_refused(suffix: str, value: Tensor) -> None:
    tensors = {
        "weight": torch.zeros(4, 8, dtype=torch.int32).view(torch.uint32),
        "scales": torch.ones(4, 2).half(),
        "biases": torch.ones(4, 2).half(),
    }
    spec = read({"group_size": 32, "bits": 4})
    assert mlx.read(tensors, spec).k == 64
    with pytest.raises(AiakqError) as caught:
        mlx.read({**tensors, suffix: value}, spec)
    assert caught.value.id in ("tensor_mismatch", "not_finite")


def test_start_up_says_that_the_embedding_is_decoded() -> None:
    config = EngineConfig.from_args({"model": str(FIXTURES / "mlx-mixed"), "device": "cpu"})
    assert "MiB of floats: embeddings are looked up in floats" in load_model(config)[1]["linear layers"]
