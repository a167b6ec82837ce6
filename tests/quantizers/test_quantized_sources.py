"""Sources that are quantized already: the same bytes as from their dequantized form, and what the report says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_files import Published, in_blocks, publish

from aiakq.arguments.convert import ConvertArguments
from aiakq.convert.conversion import convert_checkpoint
from aiakq.errors import AiakqError
from aiakq.formats.checkpoint import Checkpoint
from aiakq.formats.dequantized import dequantized
from aiakq.kernels.ops.linear_reference import dequantize

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}


@pytest.fixture(scope="session")
def released(
    tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, quantize: Callable[..., Any]
) -> Callable[[str], Path]:
    """``released(kind)``: a tiny model that is published as fp8, awq, gptq or w8a8."""
    folder = tmp_path_factory.mktemp("released")

    def make(kind: str) -> Path:
        path = folder / kind
        if path.exists():
            return path
        source = tiny_model("LlamaForCausalLM")
        if kind == "fp8":
            publish(source, path, Published(BLOCKS, lambda weight: in_blocks(weight, 128, 128, "weight_scale_inv")))
        else:
            methods = {"awq": "awq", "gptq": "gptq", "w8a8": "smooth_quant"}
            quantize(source, path, methods[kind])
        return path

    return make


@pytest.mark.parametrize(
    ("kind", "method"), [("fp8", "gptq"), ("awq", "smooth_quant"), ("gptq", "awq"), ("w8a8", "weight_only_int8")]
)
def test_the_same_bytes_as_from_dequantized_weights(
    kind: str, method: str, released: Callable[[str], Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    source, floats = released(kind), tmp_path / "floats"
    convert_checkpoint(ConvertArguments(input=str(source), output=str(floats), to="bf16"))
    report = quantize(source, tmp_path / "direct", method, dtype="bf16")
    again = quantize(floats, tmp_path / "after", method, dtype="bf16")
    assert "rounded a second time" in again.notes[0] and Checkpoint.open(source).spec.format in again.notes[0]
    ours, theirs = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("direct", "after"))
    assert ours == theirs
    assert "quantized already" in report.notes[0] and "bfloat16" in report.notes[0]
    assert "quantized already" in (tmp_path / "direct" / "README.md").read_text()
    assert report.bytes_before == sum(info.nbytes for info in Checkpoint.open(source).inventory.values())
    config = json.loads((tmp_path / "direct" / "config.json").read_text())
    assert config["aiakq"]["source"]["scheme"] == Checkpoint.open(source).spec.describe()
    assert config["aiakq"]["method"] == method


def test_figures_compare_with_the_release(
    released: Callable[[str], Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    report = quantize(released("fp8"), tmp_path / "out", "weight_only_int8", evaluate=True, eval_text="code")
    assert report.kl is not None and 0 <= report.kl < 0.05


def test_adapters_do_not_fit_what_was_scaled_before(
    released: Callable[[str], Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    """The record of scales would lack those of the first quantization."""
    from aiakq.formats.folded_scales import records_scales
    from aiakq.runtime.config.quantization import check_scales

    quantize(released("awq"), tmp_path / "gptq", "gptq")
    quantize(released("awq"), tmp_path / "awq", "awq")
    for name in ("gptq", "awq"):
        checkpoint = Checkpoint.open(tmp_path / name)
        assert not records_scales(checkpoint.config)
        with pytest.raises(AiakqError, match="scaled inputs"):
            check_scales(checkpoint.spec, checkpoint.config)
    with pytest.raises(AiakqError, match="--lora"):
        quantize(released("awq"), tmp_path / "out", "gptq", lora=str(tmp_path))


def test_workers_dequantize_too(released: Callable[[str], Path], tmp_path: Path, quantize: Callable[..., Any]) -> None:
    for workers in (1, 2):
        quantize(released("fp8"), tmp_path / str(workers), "weight_only_int8", workers=workers)
    ours, theirs = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("1", "2"))
    assert ours == theirs


def test_the_view_has_one_weight_for_each_linear(released: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint.open(released("gptq"))
    view = dequantized(checkpoint, torch.float32)
    assert view.spec is None and view.quantized_linears() == [] and view.nbytes == checkpoint.nbytes
    for name in checkpoint.quantized_linears():
        assert torch.equal(view.tensor(f"{name}.weight"), dequantize(checkpoint.read_linear(name)))
        assert view.inventory[f"{name}.weight"].dtype == "F32" and f"{name}.scales" not in view.inventory
    assert "quantization_config" not in view.config and view.config["aiakq"]["source"]["method"] == "gptq"
    assert dequantized(view, torch.float32) is view


def test_codes_without_a_config_are_refused(
    released: Callable[[str], Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    import shutil

    shutil.copytree(released("w8a8"), tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(AiakqError) as caught:
        quantize(tmp_path / "in", tmp_path / "out", "gptq")
    assert caught.value.id in ("weights_unknown", "format_unsupported")
