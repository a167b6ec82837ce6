"""/pooling of a model that returns a row for each token."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from aiakq import LLM
from aiakq.server.background import start_in_background

TEXTS = ["The first text", "another text, which is a bit longer than a step has room for", "x"]


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("LlamaForCausalLM")


@pytest.fixture(scope="module")
def reward_http(model) -> Iterator[httpx.Client]:
    given = {"model": str(model), "task": "reward", "dtype": "float32", "max_model_len": 128}
    with (
        start_in_background({**given, "num_gpu_blocks_override": 129}, timeout=240) as server,
        httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        yield client


def test_every_token_has_a_row(reward_http, model):
    llm = LLM(str(model), task="reward", dtype="float32", max_model_len=128, max_num_batched_tokens=16)
    expected = [result.outputs.data for result in llm.encode(TEXTS, use_tqdm=False)]
    answer = reward_http.post("/pooling", json={"input": TEXTS})
    assert answer.status_code == 200, answer.text
    for text, entry, rows in zip(TEXTS, answer.json()["data"], expected, strict=True):
        assert torch.equal(torch.tensor(entry["data"]), rows) and rows.shape == (len(text), 128)
    packed = reward_http.post("/pooling", json={"input": TEXTS, "encoding_format": "base64"}).json()["data"]
    for entry, rows in zip(packed, expected, strict=True):
        assert base64.b64decode(entry["data"]) == rows.numpy().tobytes()


def test_a_request_gets_no_more_rows_than_memory_has_room_for(reward_http):
    answer = reward_http.post("/pooling", json={"input": ["y" * 128] * 513})
    failure = answer.json()["error"]
    assert answer.status_code == 400 and failure["code"] == "value_out_of_range"
    assert "at most 65536 together" in failure["message"] and failure["param"] == "input"
    assert reward_http.post("/pooling", json={"input": "x"}).status_code == 200


def test_rows_are_no_embedding_and_no_score(reward_http):
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/score", {"text_1": "x", "text_2": "y"})):
        assert reward_http.post(path, json=body).json()["error"]["code"] == "task_mismatch"
