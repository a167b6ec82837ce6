"""The whole pipeline from a checkpoint to a quantized one, on tiny models, for every method."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aiakq.formats.checkpoint import Checkpoint
from aiakq.quantizers import METHODS as ALL_METHODS
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.progress import StageProgress
from aiakq.quantizers.run_report import REPORT_FILE

#: Methods whose output is a folder; gguf writes a file.
METHODS = sorted(set(ALL_METHODS) - {"gguf"})

FAMILIES = ("llama", "opt")


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_output_is_a_checkpoint_close_to_its_source(
    quantized: Callable[..., Any],
    family: str,
    method: str,
    dequantized: Callable[[Path], Any],
    relative_error: Callable[[Tensor, Tensor], float],
    ids: Tensor,
) -> None:
    source, output, report = quantized(family, method)
    checkpoint = Checkpoint.open(output)
    assert checkpoint.spec is not None
    assert checkpoint.spec.method == method
    linears = checkpoint.quantized_linears()
    assert len(linears) == 2 * (6 if family == "opt" else 7)
    assert {layer.name for layer in report.layers} == set(linears)
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (output / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((output / REPORT_FILE).read_text())["method"] == method
    error = relative_error(dequantized(output).logits(ids), dequantized(source).logits(ids))
    assert error < {"weight_only_int8": 0.05, "smooth_quant": 0.1, "fp8": 0.3}.get(
        method, 0.7
    )  # random weights amplify errors
    # Each linear is about as wrong as its bits allow; a mix-up of scales or columns is wrong by 1.
    assert 0 < report.worst.error < {"weight_only_int8": 0.02, "smooth_quant": 0.05, "fp8": 0.06}.get(method, 0.25)
    expected = {"weight_only_int8": 8, "smooth_quant": 8, "fp8": 8}.get(method, 4)
    assert expected < report.bits_per_weight < expected + 2
    assert report.bytes_after == sum(info.nbytes for info in checkpoint.inventory.values()) < report.bytes_before


@pytest.mark.parametrize("method", sorted(METHODS))
def test_same_input_and_seed_give_the_same_bytes(
    quantized: Callable[..., Any], method: str, tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    source, output, _ = quantized("llama", method)
    quantize(source, tmp_path / "again", method)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (output / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_runtime_computes_the_same(
    quantized: Callable[..., Any],
    family: str,
    method: str,
    dequantized: Callable[[Path], Any],
    relative_error: Callable[[Tensor, Tensor], float],
    ids: Tensor,
) -> None:
    from aiakq.evaluation.scoring import load_for_scoring

    _, output, _ = quantized(family, method)
    got, wanted = load_for_scoring(output, "float32", "cpu").logits(ids), dequantized(output).logits(ids)
    # Rounding activations of inputs that differ in the last bit may move a code.
    assert relative_error(got, wanted) < (1e-2 if method in ("smooth_quant", "fp8") else 1e-5)


def test_the_source_dtype_is_kept_by_default(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    source = tiny_model("LlamaForCausalLM")
    for asked, stored in ((None, "F32"), ("fp16", "F16"), ("bf16", "BF16")):
        output = tmp_path / str(asked)
        quantize(source, output, "weight_only_int8", dtype=asked)
        checkpoint = Checkpoint.open(output)
        assert checkpoint.inventory["model.norm.weight"].dtype == stored
        assert checkpoint.inventory["model.layers.0.self_attn.q_proj.weight_scale"].dtype == stored
        assert checkpoint.config["dtype"] == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[stored]


@pytest.mark.parametrize(
    "fields", [{"act_order": "static"}, {"act_order": "group"}, {"symmetric": False}, {"bits": 8}, {"bits": 3}]
)
def test_gptq_variants(
    fields: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    report = quantize(tiny_model("LlamaForCausalLM"), tmp_path / "out", "gptq", **fields)
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.spec is not None
    assert checkpoint.spec.format == ("gptq_v2" if "symmetric" in fields else "gptq")
    assert checkpoint.config["quantization_config"]["desc_act"] is False
    for prefix in checkpoint.quantized_linears():
        g_idx = checkpoint.tensor(f"{prefix}.g_idx")
        assert torch.equal(g_idx, (torch.arange(len(g_idx)) // 32).int())
    bits = fields.get("bits", 4)
    assert report.mean_error < {3: 0.25, 4: 0.12, 8: 0.01}[bits]
    assert any("vLLM" in warning for warning in report.warnings) == ("symmetric" in fields)


def test_progress_and_evaluation(
    tiny_model: Callable[..., Path], tmp_path: Path, dequantized: Callable[[Path], Any], quick: dict[str, Any]
) -> None:
    seen: list[StageProgress] = []
    loaded: list[Path] = []

    def load(folder: Path) -> Any:
        loaded.append(folder)
        return dequantized(folder)

    text = tmp_path / "text.txt"
    text.write_text("A short text to evaluate on. " * 40)
    options = QuantizeOptions(
        str(tiny_model("LlamaForCausalLM")), str(tmp_path / "out"), "weight_only_int8", **{**quick, "evaluate": True},
        eval_text=text,
    )  # fmt: skip
    report = quantize_checkpoint(options, seen.append, load)
    assert loaded[1] == tiny_model("LlamaForCausalLM")
    assert not loaded[0].exists()  # it was measured before it was published
    assert report.perplexity_after == pytest.approx(report.perplexity_before, rel=0.02)
    assert report.evaluation_text == "text.txt"
    assert report.evaluation_tokens > 500
    assert 0 <= report.kl < 0.01
    assert report.top1_agreement > 0.9
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["load", "calibrate", "quantize", "evaluate", "publish"]
    for stage in stages:
        steps = [progress for progress in seen if progress.stage == stage]
        assert [step.done for step in steps] == sorted(step.done for step in steps)
        assert steps[-1].done == steps[-1].total
    document = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    assert document["perplexity_after"] == report.perplexity_after
    assert document["worst_layer"]["name"] == report.worst.name


def test_the_runtime_measures_perplexity(
    tiny_model: Callable[..., Path], tmp_path: Path, quantize: Callable[..., Any]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A short text to evaluate on. " * 20)
    report = quantize(
        tiny_model("LlamaForCausalLM"), tmp_path / "out", "smooth_quant", evaluate=True, eval_text=text
    )  # fmt: skip
    assert report.warnings == [] or "Calibration" in report.warnings[0]
    assert report.perplexity_after == pytest.approx(report.perplexity_before, rel=0.05)
