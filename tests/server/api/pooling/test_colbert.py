"""A server of a ColBERT model: token vectors by kind of text, and scores by role."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from colbert_models import max_similarity, save_pylate, token_vectors

from aiakq.server.background import start_in_background

QUERY, DOCUMENTS = "a question?", ["An answer, with marks: (yes).", "no", "a long text. " * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_pylate("BertModel", tmp_path_factory.mktemp("colbert") / "model")


@pytest.fixture(scope="module")
def http(folder) -> Iterator[httpx.Client]:
    given = {"model": str(folder), "dtype": "float32", "max_num_seqs": 8}
    with start_in_background(given, timeout=240) as server:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
            yield client


def test_token_vectors_of_queries_and_documents(http, folder):
    for role, texts in (("query", [QUERY]), ("search_document", DOCUMENTS)):
        body = {"input": texts, "task": "token_embed", "input_type": role}
        answer = http.post("/pooling", json=body).json()
        for entry, text in zip(answer["data"], texts, strict=True):
            expected = token_vectors(folder, text, role.removeprefix("search_"))
            torch.testing.assert_close(torch.tensor(entry["data"]), expected, rtol=1e-5, atol=1e-5)
    assert answer["usage"]["prompt_tokens"] == 30 + 5 + 30


def test_scores_and_ranks_are_sums_of_largest_similarities(http, folder):
    query = token_vectors(folder, QUERY, "query")
    expected = [max_similarity(query, token_vectors(folder, text, "document")) for text in DOCUMENTS]
    scored = http.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()
    assert [entry["score"] for entry in scored["data"]] == pytest.approx(expected, abs=1e-4)
    pairs = {"queries": [QUERY] * 3, "documents": DOCUMENTS}
    assert http.post("/score", json=pairs).json()["data"] == scored["data"]
    ranked = http.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()
    assert [entry["index"] for entry in ranked["results"]] == sorted(range(3), key=lambda index: -expected[index])


def test_many_documents_are_ranked(http, folder):
    documents = [f"text {number}" for number in range(150)]
    ranked = http.post("/rerank", json={"query": QUERY, "documents": documents, "top_n": 3}).json()
    query = token_vectors(folder, QUERY, "query")
    best = ranked["results"][0]
    expected = max_similarity(query, token_vectors(folder, documents[best["index"]], "document"))
    assert best["relevance_score"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pooling", {"input": "a text"}, "input_type"),
        ("/pooling", {"input": "a text", "input_type": "topic"}, "input_type"),
        ("/pooling", {"input": [5, 6], "input_type": "query"}, "input_type"),
        ("/pooling", {"input": "a text", "input_type": "query", "task": "embed"}, "task"),
        ("/pooling", {"input": "a text", "input_type": "query", "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"input": "a text", "input_type": "query"}, None),
    ],
)
def test_requests_that_are_refused(http, path, body, param):
    answer = http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
