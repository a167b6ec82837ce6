"""Gemma 4's layers without keys of their own: no memory, no tensors, no pipeline stages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aiakq import LLM
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.left_out import describe
from aiakq.runtime.config.model import ModelConfig
from aiakq.runtime.loader.required import check_inventory
from aiakq.runtime.models.decoder import Decoder

NAME = "Gemma4ForCausalLM"


def model_of(folder: Path, **arguments: object) -> Decoder:
    fixed = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 9}
    model = LLM(str(folder), **{**fixed, **arguments}).engine.executor.runner.model
    assert isinstance(model, Decoder)
    return model


def test_layers_that_read_the_keys_of_others_take_no_pages(tiny_model: Callable[..., Path]) -> None:
    model = model_of(tiny_model(NAME))
    # Of the first three layers: two with two heads of 32 elements, one with one head of 64.
    assert model.kv_bytes_per_token(torch.float16) == 2 * 2 * (2 * 2 * 32 + 64)
    caches = model.new_caches(4, 16)
    assert [len(cache) for cache in caches] == [2, 2, 2, 0, 0, 0]


def test_keys_that_files_hold_for_layers_without_any_are_left_out(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(NAME), folder)
    tensors = load_file(folder / "model.safetensors")
    unread = {f"model.layers.5.self_attn.{name}.weight": torch.zeros(64, 128) for name in ("k_proj", "v_proj")}
    unread["model.layers.5.self_attn.k_norm.weight"] = torch.zeros(64)
    save_file(tensors | unread, folder / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
    left_out = check_inventory(config, Checkpoint.open(folder))
    assert left_out == set(unread)
    assert describe(left_out) == ["3 tensors of keys and values in layers that read those of earlier ones"]
    beside = {f"model.layers.6.{name}" for name in ("self_attn.k_proj.weight", "eh_proj.weight")}
    assert describe(left_out | beside)[1:] == ["2 tensors beside the model: model.layers.6"]
    save_file(tensors | {"model.layers.1.self_attn.x.weight": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(AiakqError, match=r"layers\.1\.self_attn\.x"):
        check_inventory(config, Checkpoint.open(folder))


def test_a_step_is_one_call_of_the_native_library(tiny_model: Callable[..., Path]) -> None:
    llm = LLM(str(tiny_model(NAME)), dtype="float32", max_model_len=64, num_gpu_blocks_override=9)
    captured = llm.engine.executor.runner.captured
    assert captured is not None and captured.describe().endswith("in one call")


def test_too_few_inputs_of_layers_and_pipeline_stages_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(AiakqError, match="vocab_size_per_layer_input is below vocab_size"):
        model_of(tiny_model(NAME, vocab_size_per_layer_input=319))
    with pytest.raises(AiakqError, match="in pipeline stages"):
        model_of(tiny_model(NAME), pipeline_parallel_size=2)
