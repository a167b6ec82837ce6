"""Requests of many texts, which are computed in parts."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.server.api.pooling.pooled_results import PooledResults
from aiakq.server.background import start_in_background
from aiakq.server.process.request_stream import Prompt


@pytest.mark.process_failures
def test_a_request_outlives_an_engine(embedder):
    """Parts that the engine has not finished when it ends are computed by the next one."""
    given = {"model": str(embedder), "task": "embed", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8}
    texts = [f"{number} " * 30 for number in range(400)]
    with (
        start_in_background({**given, "num_gpu_blocks_override": 129}, timeout=240) as server,
        httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client,
        ThreadPoolExecutor() as pool,
    ):
        running = pool.submit(client.post, "/v1/embeddings", json={"input": texts})
        while client.get("/load").json()["num_requests_running"] == 0:
            time.sleep(0.01)
        os.kill(server.ready.engine_pid, signal.SIGKILL)
        answer = running.result()
        assert answer.status_code == 200, answer.text
        assert answer.json()["data"] == client.post("/v1/embeddings", json={"input": texts}).json()["data"]
        metrics = client.get("/metrics").text
    assert re.search(r"^aiakq:engine_restarts_total\{.*\} 1.0$", metrics, re.MULTILINE)


def test_prompts_are_padded_on_the_side_of_the_tokenizer():
    for pads_left, expected in ((False, [5, 6, 0]), (True, [0, 5, 6])):
        limits = ModelLimits(vocab_size=9, max_model_len=3, max_kv_tokens=9)
        loaded = SimpleNamespace(pads_left=pads_left)
        results: Any = PooledResults()
        renderer = SimpleNamespace(text=SimpleNamespace(loaded=loaded))
        results.service = SimpleNamespace(model=SimpleNamespace(limits=limits), renderer=renderer)
        assert results._padded(Prompt(None, [5, 6]), 0).token_ids == expected
