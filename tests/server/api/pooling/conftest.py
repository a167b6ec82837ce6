"""Real servers of models that generate nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from aiakq.server.background import RunningServer, start_in_background

_ARGUMENTS = {"dtype": "float32", "num_gpu_blocks_override": 65, "max_model_len": 128, "max_num_batched_tokens": 40}


@pytest.fixture(scope="session")
def embedder(tiny_model) -> Path:
    """A small random model of embeddings, which may be cut."""
    return tiny_model("Qwen3ForCausalLM")


@pytest.fixture(scope="session")
def embedding_server(embedder) -> Iterator[RunningServer]:
    """A server of it."""
    given = {"model": str(embedder), "task": "embed", "hf_overrides": {"is_matryoshka": True}, **_ARGUMENTS}
    given |= {"max_num_seqs": 8, "max_num_queued_reqs": 40}
    with start_in_background(given, timeout=240) as running:
        yield running


@pytest.fixture(scope="session")
def classifier(tiny_classifier) -> Path:
    """A small random model with three labels."""
    names = {0: "bad", 1: "so-so", 2: "good"}
    return tiny_classifier("LlamaForCausalLM", 3, id2label=names, label2id={v: k for k, v in names.items()})


@pytest.fixture(scope="session")
def classifying_server(classifier) -> Iterator[RunningServer]:
    """A server of it."""
    with start_in_background({"model": str(classifier), **_ARGUMENTS}, timeout=240) as running:
        yield running


@pytest.fixture(scope="session")
def cross_encoder(tiny_classifier) -> Path:
    """A small random model with one label."""
    return tiny_classifier("Qwen2ForCausalLM", 1)


@pytest.fixture(scope="session")
def scoring_server(cross_encoder) -> Iterator[RunningServer]:
    """A server of it."""
    with start_in_background({"model": str(cross_encoder), **_ARGUMENTS}, timeout=240) as running:
        yield running


def _client(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60, trust_env=False)


@pytest.fixture
def embed_http(embedding_server) -> Iterator[httpx.Client]:
    """A client of the server of embeddings."""
    with _client(embedding_server) as client:
        yield client


@pytest.fixture
def classify_http(classifying_server) -> Iterator[httpx.Client]:
    """A client of the server with three labels."""
    with _client(classifying_server) as client:
        yield client


@pytest.fixture
def score_http(scoring_server) -> Iterator[httpx.Client]:
    """A client of the server with one label."""
    with _client(scoring_server) as client:
        yield client
