"""Encoders as sentence-transformers writes them, beside sentence-transformers itself where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from colbert_models import save_pylate
from encoder_models import save_encoder

from aiakq import LLM, PoolingParams

TEXTS = ["The first text", "another text, which is a bit longer", "x", "too long " * 30]
MODES = ("cls", "mean", "max", "weightedmean", "mean_sqrt_len_tokens", "lasttoken")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
sentence_transformers = pytest.importorskip("sentence_transformers")


def _saved(folder: Path, name: str, mode: str, *more: Any) -> Any:
    """A model of sentence-transformers, which is saved in ``folder``."""
    from sentence_transformers import SentenceTransformer

    encoder = save_encoder(name, folder / "encoder")
    parts = [modules.Transformer(str(encoder), max_seq_length=60), modules.Pooling(128, pooling_mode=mode), *more]
    model = SentenceTransformer(modules=parts, device="cpu")
    model.save(str(folder / "model"))
    return model


def _embeddings(folder: Path) -> torch.Tensor:
    llm = LLM(str(folder / "model"), dtype="float32")
    assert llm.config.max_model_len == 60
    found = llm.embed(TEXTS, use_tqdm=False, truncate_prompt_tokens=-1)
    return torch.tensor([each.outputs.embedding for each in found])


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_pooling_is_that_of_sentence_transformers(mode, tmp_path):
    expected = torch.tensor(_saved(tmp_path, "BertModel", mode).encode(TEXTS))
    torch.testing.assert_close(_embeddings(tmp_path), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["MPNetModel", "ModernBertModel", "XLMRobertaModel"])
def test_modules_behind_an_encoder_are_those_of_sentence_transformers(name, tmp_path):
    torch.manual_seed(2)
    model = _saved(tmp_path, name, "mean", modules.Dense(128, 24), modules.Normalize())
    torch.testing.assert_close(_embeddings(tmp_path), torch.tensor(model.encode(TEXTS)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel", "XLMRobertaModel"])
def test_scores_are_those_of_a_cross_encoder(name, tmp_path):
    from sentence_transformers import CrossEncoder

    head = "AutoModelForSequenceClassification"
    model = CrossEncoder(str(save_encoder(name, tmp_path / "one", head, num_labels=1)), device="cpu", max_length=90)
    model.save_pretrained(str(tmp_path / "model"))
    pairs = [("a query", text) for text in TEXTS] + [("a long query " * 9, "word " * 40)]
    llm = LLM(str(tmp_path / "model"), dtype="float32")
    scores = llm.score(*map(list, zip(*pairs, strict=True)), use_tqdm=False, truncate_prompt_tokens=-1)
    assert [each.outputs.score for each in scores] == pytest.approx(model.predict(pairs).tolist(), abs=1e-5)


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel", "XLMRobertaModel"])
def test_token_vectors_are_those_of_a_multi_vector_encoder(name, is_own, tmp_path):
    if not hasattr(sentence_transformers, "MultiVectorEncoder"):
        pytest.skip("sentence-transformers is older than 6.0")
    folder = save_pylate(name, tmp_path / "model", query_length=11)
    if is_own:
        sentence_transformers.MultiVectorEncoder(str(folder), device="cpu").save_pretrained(str(tmp_path / "own"))
        folder = tmp_path / "own"
    model, llm = sentence_transformers.MultiVectorEncoder(str(folder), device="cpu"), LLM(str(folder), dtype="float32")
    for role, encode in (("query", model.encode_query), ("document", model.encode_document)):
        found = llm.encode(TEXTS, pooling_params=PoolingParams(input_type=role), use_tqdm=False)
        for one, expected in zip(found, encode(TEXTS), strict=True):
            torch.testing.assert_close(one.outputs.data, torch.as_tensor(expected), rtol=1e-5, atol=1e-5)
