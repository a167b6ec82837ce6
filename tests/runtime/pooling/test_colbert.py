"""ColBERT models: token vectors and scores of the published algorithm, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from colbert_models import (
    METADATA,
    add_tokens,
    as_multi_vector_encoder,
    max_similarity,
    save_authors,
    save_pylate,
    token_vectors,
)
from jina_models import jina_bert_states, save_jina_bert
from safetensors.torch import save_file

from aiakq import LLM, PoolingParams
from aiakq.errors import AiakqError
from aiakq.quantizers.options import QuantizeOptions
from aiakq.quantizers.pipeline import quantize_checkpoint

QUERIES = ["a question?", "one that is much longer than the model reads", "x"]
DOCUMENTS = ["An answer, with marks: (yes).", "no", "a long text. " * 9]
MODELS = {
    "bert": lambda folder: save_pylate("BertModel", folder),
    "read": lambda folder: save_pylate("BertModel", folder, attend_to_expansion_tokens=True),
    "short": lambda folder: save_pylate("BertModel", folder, do_query_expansion=False, skiplist_words=["e", "!?"]),
    "unmarked": lambda folder: save_pylate("XLMRobertaModel", folder, query_prefix="", document_prefix=""),
    # Windows of 8 tokens on each side.
    "modernbert": lambda folder: save_pylate("ModernBertModel", folder, query_length=11),
    "residual": lambda folder: save_pylate("ModernBertModel", folder, residual=True, do_query_expansion=False),
    "sentence-transformers": lambda folder: as_multi_vector_encoder(save_pylate("BertModel", folder)),
    "at least so many": lambda folder: as_multi_vector_encoder(
        save_pylate("BertModel", folder, query_length=30),
        strategy="min",
        length=16,
    ),
    "authors": save_authors,
    "authors, all read": lambda folder: save_authors(folder, attend_to_mask_tokens=True, mask_punctuation=False),
}


def _vectors(llm: LLM, texts: list[str], role: str) -> list[torch.Tensor]:
    params = PoolingParams(input_type=role)
    found = llm.encode(texts, pooling_params=params, use_tqdm=False, pooling_task="token_embed")
    return [each.outputs.data for each in found]


@pytest.mark.parametrize("name", MODELS)
def test_vectors_and_scores_are_those_of_the_algorithm_in_any_batch(name, tmp_path):
    folder = MODELS[name](tmp_path / "model")
    llm = LLM(str(folder), dtype="float32")
    assert llm.engine.facts["task"] == "embed, ALL, normalized: 24 numbers for each row"
    expected: dict[str, list[torch.Tensor]] = {}
    for role, texts in (("query", QUERIES), ("document", DOCUMENTS)):
        expected[role] = [token_vectors(folder, text, role) for text in texts]
        together = _vectors(llm, texts, role)
        for text, found, wanted in zip(texts, together, expected[role], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
            assert torch.equal(_vectors(llm, [text], role)[0], found)
    scores = [each.outputs.score for each in llm.score(QUERIES[0], DOCUMENTS, use_tqdm=False)]
    wanted = [max_similarity(expected["query"][0], document) for document in expected["document"]]
    assert scores == pytest.approx(wanted, abs=1e-4)


def test_token_ids_are_read_as_they_are(tmp_path):
    folder = save_pylate("BertModel", tmp_path / "model")
    llm = LLM(str(folder), dtype="float32")
    [found] = llm.encode("no.", pooling_params=PoolingParams(input_type="document"), use_tqdm=False)
    ids = found.prompt_token_ids
    tokenizer = llm.get_tokenizer()
    assert ids == tokenizer.convert_tokens_to_ids(["<s>", "[D] ", "n", "o", ".", "</s>"])
    [whole] = llm.encode({"prompt_token_ids": ids}, use_tqdm=False)
    assert torch.equal(whole.outputs.data[[0, 1, 2, 3, 5]], found.outputs.data)


def test_what_a_request_says_about_its_texts(tmp_path):
    llm = LLM(str(save_pylate("BertModel", tmp_path / "model")), dtype="float32")
    for params, word in (
        ({}, "input_type"),
        ({"input_type": "topic"}, "input_type"),
        ({"prompt_name": "query"}, "use input_type"),
    ):
        with pytest.raises(AiakqError, match=word):
            llm.encode("a text", pooling_params=PoolingParams(**params), use_tqdm=False)
    with pytest.raises(AiakqError, match="token_embed"):
        llm.encode("a text", pooling_params=PoolingParams(input_type="query"), use_tqdm=False, pooling_task="embed")
    [cut] = llm.encode(
        "a text", pooling_params=PoolingParams(input_type="document"), use_tqdm=False, truncate_prompt_tokens=5
    )
    assert len(cut.prompt_token_ids) == 5


@pytest.mark.parametrize("name", ["bert", "authors"])
def test_quantized_models_keep_the_projection(name, tmp_path):
    source = MODELS[name](tmp_path / "source")
    quantize_checkpoint(QuantizeOptions(str(source), str(tmp_path / "out"), "weight_only_int8"))
    for folder, options in ((tmp_path / "out", {}), (source, {"quantization": "int8"})):
        llm = LLM(str(folder), dtype="float32", **options)
        for role in ("query", "document"):
            [found], exact = _vectors(llm, ["a text"], role), token_vectors(source, "a text", role)
            assert float((found * exact).sum(1).min()) > 0.98 and not torch.equal(found, exact)


def test_jina_bert_of_the_authors(tmp_path):
    """As jina-colbert-v1."""
    tensors = save_jina_bert(tmp_path, outer="bert.", architectures=["HF_ColBERT"])
    add_tokens(tmp_path, ("[unused0]", "[unused1]"))
    projection = torch.randn(24, 96) / 9
    stored = {f"bert.{name}": tensor for name, tensor in tensors.items()} | {"linear.weight": projection}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "artifact.metadata").write_text(json.dumps(METADATA | {"mask_punctuation": False}))
    params = PoolingParams(input_type="document")
    [found] = LLM(str(tmp_path), dtype="float32").encode("a text", pooling_params=params, use_tqdm=False)
    states = jina_bert_states(tensors, found.prompt_token_ids)
    expected = torch.nn.functional.normalize(states @ projection.T, dim=-1)
    torch.testing.assert_close(found.outputs.data, expected, rtol=1e-5, atol=1e-5)


def _changed(folder: Path, file: str, **values: Any) -> Path:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **values}))
    return folder


SETTINGS = "config_sentence_transformers.json"


@pytest.mark.parametrize(
    ("file", "values", "id", "word"),
    [
        (SETTINGS, {"query_prefix": "[unknown] "}, "unsupported", "the marker"),
        (SETTINGS, {"prompts": {"query": "find: "}}, "unsupported", "prompts"),
        (SETTINGS, {"similarity_fn_name": "MeanMaxSim"}, "unsupported", "MeanMaxSim"),
        (SETTINGS, {"query_length": "32"}, "model_malformed", "query_length"),
        (SETTINGS, {"skiplist_words": [5]}, "model_malformed", "skiplist_words"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "unsupported", "sentence_embedding"),
        ("tokenizer_config.json", {"mask_token": None}, "unsupported", "mask token"),
    ],
)
def test_pylate_folders_that_are_not_computed_are_refused(file, values, id, word, tmp_path):
    folder = _changed(save_pylate("BertModel", tmp_path / "model"), file, **values)
    with pytest.raises(AiakqError, match=word) as caught:
        LLM(str(folder), dtype="float32")
    assert caught.value.id == id


@pytest.mark.parametrize(
    ("file", "values", "word"),
    [
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": ["query", "document"]}, "skiplist_tasks"),
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [5]}, "keep_only_token_ids"),
        ("3_Normalize/config.json", {"module_input_name": "sentence_embedding"}, "sentence_embedding"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "twice", "length": 16}}, "twice"),
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "min", "length": 16, "token": "[?]"}}, "lacks"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"padding": True}}}, "processing_kwargs"),
    ],
)
def test_multi_vector_encoders_that_are_not_computed_are_refused(file, values, word, tmp_path):
    folder = _changed(as_multi_vector_encoder(save_pylate("BertModel", tmp_path / "model")), file, **values)
    with pytest.raises(AiakqError, match=word) as caught:
        LLM(str(folder), dtype="float32")
    assert caught.value.id == "unsupported"


@pytest.mark.parametrize(
    ("metadata", "id", "word"),
    [
        ({"similarity": "l2"}, "unsupported", "similarity"),
        ({"interaction": "flipr"}, "unsupported", "interaction"),
        ({"doc_token_id": "[D]"}, "unsupported", "the marker"),
        ({"dim": 0}, "model_malformed", "artifact.metadata"),
        ({"dim": 23}, "tensor_inventory", "linear.weight"),
    ],
)
def test_folders_of_the_authors_that_are_not_computed_are_refused(metadata, id, word, tmp_path):
    with pytest.raises(AiakqError, match=word) as caught:
        LLM(str(save_authors(tmp_path / "model", **metadata)), dtype="float32")
    assert caught.value.id == id


def test_further_refusals(tmp_path):
    folder = save_authors(tmp_path / "authors")
    (folder / "artifact.metadata").rename(folder / "other")
    with pytest.raises(AiakqError, match="without artifact.metadata"):
        LLM(str(folder), dtype="float32")
    far = save_pylate("ModernBertModel", tmp_path / "far", query_length=12)
    with pytest.raises(AiakqError, match="windows of attention"):
        LLM(str(far), dtype="float32")
    near = save_pylate("BertModel", tmp_path / "near")
    with pytest.raises(AiakqError, match="a vector per token"):
        LLM(str(near), dtype="float32", override_pooler_config={"pooling_type": "MEAN"})
