"""Layers that families compute in floats, in checkpoints that hold them quantized."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import ScoringModel
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig


def logits(folder: Path) -> torch.Tensor:
    config = EngineConfig.from_args({"model": str(folder), "device": "cpu", "dtype": "float32", "cpu_math": "exact"})
    ids = torch.randint(3, 250, (1, 24), generator=torch.Generator().manual_seed(0))
    return ScoringModel(load_model(config)[0], config).logits(ids)[0]


def with_int8_routers(source: Path, folder: Path, dequantized: bool, **settings: Any) -> Path:
    """The model with its routers as LLM.int8 stores them, or as what these decode to."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    routers = [name for name in tensors if name.endswith("router.layer.weight")]
    assert routers
    for name in routers:
        weight = tensors[name].float()
        scale = weight.abs().amax(1)
        codes = (weight * 127 / scale[:, None]).round().to(torch.int8)
        if dequantized:
            tensors[name] = codes * (scale / 127)[:, None]
        else:
            tensors |= {name: codes, name.replace(".weight", ".SCB"): scale}
    if not dequantized:
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_quantized_routers_are_decoded(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("GraniteMoeForCausalLM")
    packed = with_int8_routers(source, tmp_path / "packed", dequantized=False)
    plain = with_int8_routers(source, tmp_path / "plain", dequantized=True)
    torch.testing.assert_close(logits(packed), logits(plain), rtol=1e-5, atol=1e-5)


def test_codes_of_another_format_are_refused_by_name(tmp_path: Path) -> None:
    """Found by ``make fuzz``: the estimate of memory failed on a module without a tensor of the config's format."""
    shutil.copytree(Path(__file__).parents[2] / "formats/fixtures/lc-mxfp8", tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    save_file({**load_file(path), "model.layers.0.self_attn.qweight": torch.ones(4, 4)}, path)
    with pytest.raises(AiakqError, match="model.layers.0.self_attn.qweight"):
        logits(tmp_path / "model")


def test_routers_with_rounded_activations_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("GraniteMoeForCausalLM")
    folder = with_int8_routers(source, tmp_path / "packed", dequantized=False, llm_int8_threshold=0.0)
    with pytest.raises(AiakqError, match="router.layer with rounded activations"):
        logits(folder)
