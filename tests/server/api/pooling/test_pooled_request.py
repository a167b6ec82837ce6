"""Requests of many texts, which are computed in parts."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx

from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.server.api.pooling.pooled_request import PoolingCall
from aiakq.server.background import start_in_background
from aiakq.server.process.request_stream import Prompt


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


def test_all_parts_of_a_request_have_one_version_of_its_adapter():
    """Also when another one is loaded in its place between two parts."""
    adapters = iter([AdapterRef(version, "sql", "/adapters/sql", 1) for version in ("version 1", "version 2")])
    started: list[str] = []
    service: Any = SimpleNamespace(
        model=SimpleNamespace(limits=SimpleNamespace(pools=lambda: None), adapter=lambda name: next(adapters)),
        manager=SimpleNamespace(start=lambda request: started.append(request.options.adapter.key)),
        fair_share=False,
        check_open=lambda: None,
    )
    payload: Any = SimpleNamespace(
        model="sql", truncate_prompt_tokens=None, truncation_side=None, padding=None, priority=None
    )
    request: Any = SimpleNamespace(state=SimpleNamespace(request_id="r"))
    call = PoolingCall(service, request, payload, "pool-", SimpleNamespace(arrival_time=0.0))
    for _ in range(2):
        asyncio.run(call._start([], SimpleNamespace()))
    assert started == ["version 1", "version 1"]


def test_prompts_are_padded_on_the_side_of_the_tokenizer():
    for pads_left, expected in ((False, [5, 6, 0]), (True, [0, 5, 6])):
        limits = SimpleNamespace(max_model_len=3, max_kv_tokens=9)
        loaded = SimpleNamespace(pads_left=pads_left)
        call: Any = PoolingCall.__new__(PoolingCall)
        call.service = SimpleNamespace(model=SimpleNamespace(limits=limits), text=SimpleNamespace(loaded=loaded))
        assert call._padded(Prompt(None, [5, 6]), 0).token_ids == expected
