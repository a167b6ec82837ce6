"""Servers of encoders: embeddings and scores of pairs, through the openai client and as plain requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from encoder_models import save_encoder
from openai import OpenAI

from aiakq.server.background import RunningServer, start_in_background

TEXTS = ["The first text", "another text, which is a bit longer than the first", "x"]
_ARGUMENTS = {"dtype": "float32", "max_num_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_encoder("BertModel", tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def server(folder) -> Iterator[RunningServer]:
    with start_in_background({"model": str(folder), **_ARGUMENTS}, timeout=240) as running:
        yield running


@pytest.fixture(scope="module")
def reranker(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    return save_encoder("BertModel", folder, "AutoModelForSequenceClassification", num_labels=1)


def _client(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False)


def test_the_openai_client_gets_embeddings_of_an_encoder(server, folder):
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    with httpx.Client(trust_env=False) as plain:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=plain)
        answer = client.embeddings.create(model=str(folder), input=TEXTS)
    for entry, text in zip(answer.data, TEXTS, strict=True):
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(mean, dim=-1)
        torch.testing.assert_close(torch.tensor(entry.embedding), expected, rtol=1e-5, atol=1e-5)


def test_long_texts_are_refused_or_cut_at_their_end(server):
    with _client(server) as http:
        refused = http.post("/v1/embeddings", json={"input": "y" * 200})
        cut = http.post("/v1/embeddings", json={"input": "y" * 200, "truncate_prompt_tokens": -1})
        same = http.post("/v1/embeddings", json={"input": "y" * 94})
        left = http.post("/v1/embeddings", json={"input": "z" + "y" * 50, "truncate_prompt_tokens": 12})
        right = {"input": "z" + "y" * 9}
        assert refused.status_code == 400 and "truncate_prompt_tokens" in refused.text
        assert cut.json()["usage"]["prompt_tokens"] == 96
        assert cut.json()["data"] == same.json()["data"]
        assert left.json()["data"] == http.post("/v1/embeddings", json=right).json()["data"]
        padded = http.post("/v1/embeddings", json={**right, "padding": "max_length"})
        assert padded.json()["data"] == left.json()["data"]
        few = http.post("/v1/embeddings", json={"input": "yyy", "truncate_prompt_tokens": 2})
        assert few.status_code == 400 and "special tokens" in few.text


def test_an_encoder_generates_nothing(server, folder):
    with _client(server) as http:
        for path, body in {
            "/v1/completions": {"prompt": "x"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        }.items():
            refused = http.post(path, json={"model": str(folder), **body})
            assert refused.status_code == 400 and "--task" in refused.json()["error"]["message"], refused.text


def test_scores_of_pairs_are_those_of_transformers(reranker):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(reranker, dtype=torch.float32)
    tokenizer, query = AutoTokenizer.from_pretrained(reranker), "a question"
    with torch.no_grad():
        expected = [float(model(**tokenizer(query, text, return_tensors="pt")).logits.sigmoid()) for text in TEXTS]
    with start_in_background({"model": str(reranker), **_ARGUMENTS}, timeout=240) as server, _client(server) as http:
        scored = http.post("/score", json={"text_1": query, "text_2": TEXTS}).json()
        ranked = http.post("/rerank", json={"query": query, "documents": TEXTS}).json()
        cut = http.post("/score", json={"text_1": query, "text_2": "y" * 200, "truncate_prompt_tokens": -1})
    assert [entry["score"] for entry in scored["data"]] == pytest.approx(expected, abs=1e-5)
    best_first = sorted(range(3), key=lambda index: -expected[index])
    assert [entry["index"] for entry in ranked["results"]] == best_first
    assert cut.json()["usage"]["prompt_tokens"] == 96
