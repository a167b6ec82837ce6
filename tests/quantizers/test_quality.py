"""The comparison of an output with its source model before the output is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aiakq.errors import AiakqError, error
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint
from aiakq.quantizers.quality import limit_note


def options(source: Path, output: Path, text: Path, **fields: Any) -> QuantizeOptions:
    text.write_text("A short text to evaluate on. " * 20)
    settings = {"samples": 8, "seqlen": 64, "device": "cpu", "eval_text": text, **fields}
    return QuantizeOptions(str(source), str(output), "gptq", **settings)


def failing_loader(folder: Path) -> Any:
    raise error("model_malformed", file=str(folder / "config.json"), reason="it cannot be scored")


def test_an_output_whose_quality_cannot_be_measured_is_published_with_a_warning(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    asked = options(tiny_model("LlamaForCausalLM"), tmp_path / "out", tmp_path / "text.txt", group_size=32)
    report = quantize_checkpoint(asked, None, failing_loader)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert report.perplexity_before is None and report.kl is None
    (warning,) = [each for each in report.warnings if each.startswith("Perplexity was not measured: ")]
    assert "it cannot be scored" in warning


def test_a_limit_on_the_quality_that_cannot_be_checked_fails(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM")
    asked = options(source, tmp_path / "out", tmp_path / "text.txt", max_kl=0.5)
    with pytest.raises(AiakqError, match="it cannot be scored") as caught:
        quantize_checkpoint(asked, None, failing_loader)
    assert caught.value.id == "model_malformed"
    assert not (tmp_path / "out").exists()


def test_the_report_of_a_limit_says_what_it_limits_and_how_sure_that_is() -> None:
    text = {"name": "prose", "kl": 0.0412, "kl_interval": {"low": 0.036, "high": 0.0471}}
    assert limit_note(None, text) == []
    (note,) = limit_note(0.05, text)
    assert note == "--max-kl 0.05 limits the mean on prose, 0.0412, whose 95 % interval is 0.036 to 0.0471."
    assert limit_note(0.05, {**text, "kl_interval": None}) == ["--max-kl 0.05 limits the mean on prose, 0.0412."]


def test_several_texts_are_measured_apart(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    given = options(tiny_model("LlamaForCausalLM"), tmp_path / "out", tmp_path / "text.txt", group_size=32)
    report = quantize_checkpoint(replace(given, eval_text=f"{tmp_path / 'text.txt'},dialogue"))
    assert [text["name"] for text in report.evaluations] == ["text.txt", "dialogue"]
    first, second = report.evaluations
    assert report.kl == first["kl"] != second["kl"] and report.evaluation_text == "text.txt"
    assert len(second["worst_tokens"]) == 5 and second["kl_interval"]["low"] < second["kl"]
