"""Quantized encoders: rounded to 8 bits, and served as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from encoder_models import ENCODERS, save_encoder

from aiakq import LLM
from aiakq.errors import AiakqError
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint


def _embedding(folder: Path, **arguments: str) -> torch.Tensor:
    llm = LLM(str(folder), dtype="float32", **arguments)
    return torch.tensor(llm.embed("a text of some tokens", use_tqdm=False)[0].outputs.embedding)


#: Families whose files name other layers than transformers' classes.
RENAMED = ("GteModel", "NomicBertModel", "JinaEmbeddingsV3Model")


@pytest.mark.parametrize("name", [name for name in ENCODERS if name not in RENAMED])
def test_encoders_are_rounded_to_8_bits(name, tmp_path):
    source = save_encoder(name, tmp_path / "source")
    report = quantize_checkpoint(QuantizeOptions(str(source), str(tmp_path / "out"), "weight_only_int8"))
    assert not report.predicts_text and not [text for text in report.warnings if "positions" not in text]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "feature-extraction" in card and "AutoModel." in card
    original, rounded, at_load = (
        _embedding(source),
        _embedding(tmp_path / "out"),
        _embedding(source, quantization="int8"),
    )
    assert 0.99 < original @ rounded < 1 and 0.99 < original @ at_load < 1


@pytest.mark.parametrize("name", RENAMED)
def test_some_are_rounded_at_load_only(name, tmp_path):
    source = save_encoder(name, tmp_path / "source")
    with pytest.raises(AiakqError, match="--quantization int8"):
        quantize_checkpoint(QuantizeOptions(str(source), str(tmp_path / "out"), "weight_only_int8"))
    assert 0.99 < _embedding(source) @ _embedding(source, quantization="int8") < 1


def test_a_quantized_model_keeps_its_head(tmp_path):
    head = "AutoModelForSequenceClassification"
    source = save_encoder("XLMRobertaModel", tmp_path / "source", head, num_labels=1)
    quantize_checkpoint(QuantizeOptions(str(source), str(tmp_path / "out"), "weight_only_int8"))
    scores = [
        LLM(str(folder), dtype="float32").score("a question", "an answer", use_tqdm=False)[0].outputs.score
        for folder in (source, tmp_path / "out")
    ]
    assert scores[0] == pytest.approx(scores[1], abs=0.05)


@pytest.mark.parametrize(
    ("method", "options"), [("gptq", {}), ("awq", {}), ("smooth_quant", {}), ("weight_only_int8", {"lm_head": 8})]
)
def test_what_needs_text_to_predict_is_refused(method, options, tmp_path):
    source = save_encoder("BertModel", tmp_path / "source")
    with pytest.raises(AiakqError, match="BertModel") as refused:
        quantize_checkpoint(QuantizeOptions(str(source), str(tmp_path / "out"), method, **options))
    assert refused.value.id == "option_conflict"
