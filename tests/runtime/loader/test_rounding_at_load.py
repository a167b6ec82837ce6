"""Weights that are rounded while they are loaded: the logits of the checkpoint that aiakq quantize writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.evaluation.scoring import ScoringModel
from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.loader.memory_check import weight_bytes
from aiakq.runtime.loader.rounding import RoundingAtLoad

QUICK = {"samples": 1, "seqlen": 16, "evaluate": False, "device": "cpu"}


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_args({"model": str(folder), "device": "cpu", **options})


def logits(folder: Path, **options: Any) -> torch.Tensor:
    config = config_of(folder, **options)
    ids = torch.randint(3, 250, (1, 24), generator=torch.Generator().manual_seed(0))
    return ScoringModel(load_model(config)[0], config).logits(ids)[0]


@pytest.mark.parametrize(
    "family", ["LlamaForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM", "OPTForCausalLM"]
)
def test_int8_is_weight_only_int8_with_full_ranges(
    family: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model(family)
    options = QuantizeOptions(str(source), str(tmp_path / "q"), "weight_only_int8", scale_search="minmax", **QUICK)
    quantize_checkpoint(options)
    assert torch.equal(logits(source, quantization="int8"), logits(tmp_path / "q"))
    names = {name.removesuffix(".weight") for name in RoundingAtLoad(Checkpoint.open(source), _spec()).weights()}
    assert names == set(Checkpoint.open(tmp_path / "q").quantized_linears())


def _spec() -> Any:
    from aiakq.runtime.config.quantization import ROUNDINGS

    return ROUNDINGS["int8"]


def test_int4_is_round_to_nearest_with_searched_ranges(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rounder: {name: rtn, scale_search: mse}\nbits: 4\ngroup_size: 128\nsymmetric: true\n")
    options = QuantizeOptions.from_recipe(
        recipe, input=str(source), output=str(tmp_path / "q"), format="compressed-tensors", **QUICK
    )
    quantize_checkpoint(options)
    assert torch.equal(logits(source, quantization="int4"), logits(tmp_path / "q"))


def test_fp8_is_near_the_original(tiny_model: Callable[..., Path]) -> None:
    source = tiny_model("LlamaForCausalLM")
    wanted, found = logits(source), logits(source, quantization="fp8")
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.2


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("weight_only_int8", "w8a16"), ("experts_int8", "w8a16"), ("ptpc_fp8", "fp8a16"), ("bitsandbytes", "w4a16")],
)
def test_names_of_other_programs(name: str, scheme: str, tiny_model: Callable[..., Path]) -> None:
    config = config_of(tiny_model("LlamaForCausalLM"), quantization=name)
    assert config.load.rounds and config.spec is not None and config.spec.scheme == scheme


def test_what_was_done_is_said(tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tiny_model("LlamaForCausalLM"), quantization="int8")
    _, facts = load_model(config)
    assert "rounded to w8a16 channel sym while they were loaded" in facts["linear layers"]
    notices = [record.getMessage() for record in caplog.records if "rounded" in record.getMessage()]
    assert len(notices) == 1 and "aiakq quantize measures the error" in notices[0]


def test_they_need_the_memory_of_codes(tiny_model: Callable[..., Path]) -> None:
    source = tiny_model("LlamaForCausalLM")
    whole, rounded = weight_bytes(config_of(source)), weight_bytes(config_of(source, quantization="int8"))
    width = config_of(source).device.dtype.itemsize
    counts = RoundingAtLoad(Checkpoint.open(source), _spec()).weights()
    assert whole - rounded == sum(counts.values()) * (width - 1)


def test_what_cannot_be_rounded_is_refused_by_name(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    for family, reason in (
        ("GPT2LMHeadModel", "stored transposed"),
        ("GraniteMoeForCausalLM", "experts are fused"),
        ("GPTNeoXForCausalLM", "native models only"),
    ):
        with pytest.raises(AiakqError, match=reason):
            load_model(config_of(tiny_model(family), quantization="int8"))
    shutil.copytree(tiny_model("LlamaForCausalLM"), tmp_path / "q")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    raw = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(json.dumps(raw | {"quantization_config": settings}))
    with pytest.raises(AiakqError) as caught:
        config_of(tmp_path / "q", quantization="int8")
    assert caught.value.id == "quantization_mismatch"


def test_lora_adapters_apply_to_rounded_layers(tiny_model: Callable[..., Path]) -> None:
    config = config_of(tiny_model("LlamaForCausalLM"), quantization="int8", enable_lora=True)
    model, _ = load_model(config)
    assert model.adapters is not None
