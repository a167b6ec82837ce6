"""The comparison of an output with its source model before the output is published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiakq.errors import AiakqError, error
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint


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
