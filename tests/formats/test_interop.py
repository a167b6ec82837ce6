"""Checkpoints that GPTQModel, AutoAWQ, llm-compressor and AutoRound wrote: each loads and has the expected logits."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from aiakq.evaluation.scoring import ScoringModel
from aiakq.formats.checkpoint import Checkpoint
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.engine import EngineConfig

ROOTS = [Path(__file__).parent / "fixtures"]
if os.environ.get("AIAKQ_INTEROP"):
    ROOTS.append(Path(os.environ["AIAKQ_INTEROP"]))
FOLDERS = sorted(path.parent for root in ROOTS for path in root.glob("*/expected.safetensors"))


def logits(folder: Path, ids: torch.Tensor, impl: str) -> torch.Tensor:
    exact = {"dtype": "float32", "device": "cpu", "cpu_math": "exact"}
    config = EngineConfig.from_args({"model": str(folder), "model_impl": impl} | exact)
    return ScoringModel(load_model(config)[0], config).logits(ids)[0]


@pytest.mark.parametrize("impl", ["aiakq", "transformers"])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_logits_are_those_of_the_weights(folder, impl):
    """Through our own model, and with our linears inside transformers' model."""
    expected = load_file(folder / "expected.safetensors")
    found = logits(folder, expected["input_ids"], impl)
    rounded_inputs = "logits_rounded_fp32" in expected
    wanted = expected["logits_rounded_fp32" if rounded_inputs else "logits_dequantized_fp32"]
    away = ((found - wanted).norm() / wanted.norm()).item()
    # What is expected of others with rounded activations leaves their rounding out.
    rounded = {"lc-sq": 0.04, "lc-fp8_dynamic": 0.06, "fp8-deepseek-block": 0.06, "lc-nvfp4": 0.25}
    # The largest input of a token lies between two codes (fixtures/README.md).
    rounded |= {"ao-int8-dyn": 0.01}
    assert away < (1e-5 if rounded_inputs else rounded.get(folder.name, 1e-5))


def test_there_is_a_fixture_of_every_tool():
    names = {folder.name for folder in FOLDERS}
    assert len(names) >= 18 and {name.partition("-")[0] for name in names} >= {"gq", "aawq", "lc", "ar"}


def test_bit_widths_are_read_per_layer():
    """The config of one has widths for each layer, that of the other a head of its own; the files say the same."""
    checkpoint = Checkpoint.open(ROOTS[0] / "gq-dyn")
    schemes = {name: checkpoint.read_linear(name).scheme for name in checkpoint.quantized_linears()}
    assert len(schemes) == 12 and not any("down" in name for name in schemes)
    assert all(scheme == ("w8a16" if ".1." in name else "w4a16") for name, scheme in schemes.items())
    for name, scheme in schemes.items():
        assert checkpoint.spec.for_layer(name).scheme == scheme
    assert checkpoint.spec.for_layer("model.layers.0.mlp.down_proj") is None
    assert checkpoint.spec.for_layer("lm_head") is None
    checkpoint = Checkpoint.open(ROOTS[0] / "gq-lmhead")
    head = checkpoint.read_linear("lm_head")
    assert (head.scheme, head.group_size) == ("w8a16", 32)
    assert checkpoint.spec.for_layer("lm_head").layer.group_size == 32


@pytest.mark.parametrize(("name", "file"), [("gq-w3", "quantize_config.json"), ("aawq", "quant_config.json")])
def test_the_quantization_may_be_in_a_separate_file(tmp_path, name, file):
    """AutoGPTQ and AutoAWQ of old put it beside config.json."""
    folder = tmp_path / "model"
    shutil.copytree(ROOTS[0] / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / file).write_text(json.dumps(config.pop("quantization_config")))
    (folder / "config.json").write_text(json.dumps(config))
    expected = load_file(folder / "expected.safetensors")
    for impl in ("aiakq", "transformers"):
        found = logits(folder, expected["input_ids"], impl)
        torch.testing.assert_close(found, expected["logits_dequantized_fp32"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_a_mislabelled_asymmetric_file_gets_a_remark(tmp_path, label):
    folder = tmp_path / "model"
    shutil.copytree(ROOTS[0] / "gq-asym-v2", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"checkpoint_format": label, "format": label}
    (folder / "config.json").write_text(json.dumps(config))
    _, facts = load_model(EngineConfig.from_args({"model": str(folder), "device": "cpu"}))
    assert ("off centre" in facts["linear layers"]) == (label == "gptq")
