"""Several engines behind one address: where requests go, and what happens when one engine ends."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.request import Prompt, Request, RequestOptions
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.server.process.replicas import PrefixMap, Replicas


class Manager:
    """The RequestManager that Replicas uses."""

    def __init__(self, waiting_tokens: int = 0, unfinished: int = 0, failure: AiakqError | None = None) -> None:
        self.num_waiting_tokens, self.num_unfinished, self.failure = waiting_tokens, unfinished, failure
        self.refuses: AiakqError | None = failure
        self.taken: list[str] = []

    def start(self, request: Request) -> str:
        if self.refuses is not None:
            raise self.refuses
        self.taken.append(request.id)
        return request.id


def prompt(*tokens: int) -> list[Prompt]:
    return [Prompt(None, list(tokens))]


def start(replicas: Replicas, tokens: list[int], **options: Any) -> int:
    """The replica that takes a prompt."""
    before = [len(manager.taken) for manager in replicas.managers]
    replicas.start(Request("id", prompt(*tokens), SamplingParams(), RequestOptions(**options)))
    return next(number for number, manager in enumerate(replicas.managers) if len(manager.taken) > before[number])


def test_a_prompt_goes_where_its_beginning_was_computed():
    replicas = Replicas([Manager(), Manager(), Manager()], 16)
    shared = [list(range(start, start + 64)) for start in (0, 1000, 2000)]
    replicas.managers[0].num_waiting_tokens = 10
    first = start(replicas, shared[0])
    assert first == 1  # the least busy, and of equal ones the first
    replicas.managers[0].num_waiting_tokens = 0
    assert start(replicas, [*shared[0], 7, 8, 9]) == first
    assert start(replicas, [*shared[0][:63], 5000]) == first  # three pages of it
    assert start(replicas, shared[1]) == 0 and start(replicas, [*shared[0], 1]) == first


def test_other_salts_share_nothing():
    replicas = Replicas([Manager(), Manager()], 16)
    replicas.managers[0].num_waiting_tokens = 1
    assert start(replicas, list(range(64))) == 1
    replicas.managers[0].num_waiting_tokens = 0
    assert start(replicas, list(range(64)), cache_salt="mine") == 0


def test_a_popular_beginning_does_not_overload_a_replica():
    """Waiting work outweighs a cached prefix."""
    replicas = Replicas([Manager(), Manager()], 16)
    counts = [0, 0]
    for number in range(100):
        taken = start(replicas, [*range(160), number])
        counts[taken] += 1
        replicas.managers[taken].num_unfinished += 1
    assert min(counts) > 40


def test_a_replica_without_an_engine_is_tried_last():
    dead = error("engine_dead", reason="it was killed")
    replicas = Replicas([Manager(failure=dead), Manager(unfinished=50)], 16)
    assert start(replicas, [1, 2, 3]) == 1 and replicas.failure is None
    replicas.managers[1].failure = replicas.managers[1].refuses = dead
    assert replicas.failure is dead
    with pytest.raises(AiakqError, match="it was killed"):
        start(replicas, [1, 2, 3])


def test_a_full_replica_passes_requests_on_and_bad_requests_are_refused_once():
    full = error("overloaded", waiting=3, what="sequences", limit=3, flag="--max-num-queued-reqs")
    replicas = Replicas([Manager(), Manager(unfinished=5)], 16)
    replicas.managers[0].refuses = full
    assert start(replicas, [1, 2, 3]) == 1
    replicas.managers[0].refuses = error("empty_prompt", param="prompt")
    with pytest.raises(AiakqError) as refused:
        start(replicas, [1, 2, 3])
    assert refused.value.id == "empty_prompt"


def test_prefixes_are_forgotten_least_recently_used_first_and_with_their_engine():
    known = PrefixMap(4, max_prefixes=4)
    first, second = (known.hashes(range(start, start + 9), "") for start in (0, 100))
    assert len(first) == 2 and not set(first) & set(second)
    known.insert(first, 0)
    known.insert(second, 1)
    assert known.num_cached(first, 0) == 8 and known.num_cached(first, 1) == 0
    known.insert(known.hashes(range(200, 208), ""), 1)
    assert known.num_cached(first, 0) == 0 and known.num_cached(second, 1) == 8
    known.forget(1)
    assert known.num_cached(second, 1) == 0


# --- a real server ----------------------------------------------------------------------------------------------------

LONG = {"prompt": "A very long story begins", "temperature": 0, "max_tokens": 700, "ignore_eos": True}


def post(server, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)


def by_engine(server, name: str) -> dict[str, float]:
    """The samples of a metric by its label ``engine``."""
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.labels["engine"]: sample.value for sample in samples if sample.name == name}


def engines(server) -> list[int]:
    import psutil

    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        if "engine_process" in " ".join(child.cmdline()):
            found.append(child.pid)
    return found


@pytest.mark.process_failures
def test_one_dead_replica_does_not_stop_the_others(start_server):
    draw = random.Random(1)
    bodies = [LONG | {"prompt": [draw.randrange(5, 500) for _ in range(40)], "max_tokens": 40} for _ in range(12)]
    with start_server(data_parallel_size=2) as server, ThreadPoolExecutor(16) as pool:
        assert len(engines(server)) == 2
        expected = [post(server, body).json()["choices"][0]["text"] for body in bodies]
        assert sum(by_engine(server, "vllm:generation_tokens_total").values()) == 40 * 12
        again = list(pool.map(lambda body: post(server, body).json()["choices"][0]["text"], bodies))
        assert again == expected  # on whichever replica
        assert min(by_engine(server, "vllm:generation_tokens_total").values()) > 0
        streams = [pool.submit(post, server, LONG) for _ in range(4)]
        while sum(by_engine(server, "vllm:num_requests_running").values()) < 4:
            time.sleep(0.02)
        os.kill(engines(server)[0], signal.SIGKILL)
        for body, text in zip(bodies, expected, strict=True):
            answer = post(server, body)
            assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == text
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        texts = {stream.result().json()["choices"][0]["text"] for stream in streams}
        assert len(texts) == 1  # the other replica replayed them
        assert not any(event.kind == "engine_ready" for event in server.events)
        while not any(event.kind == "engine_ready" for event in server.events):
            time.sleep(0.05)
        assert sum(by_engine(server, "aiakq:engine_restarts_total").values()) == 1
        assert any(event.kind == "engine_dead" and "Replica" in event.message for event in server.events)
        assert server.stop() == 0


def test_equal_beginnings_are_computed_once(start_server):
    with start_server(data_parallel_size=2) as server:
        for number in range(6):
            post(server, {"prompt": [*range(10, 90), number + 5], "max_tokens": 1})
        hits = by_engine(server, "vllm:prefix_cache_hits_total")
        assert sorted(hits.values()) == [0, 5 * 80]
        assert httpx.get(f"{server.url}/load", trust_env=False).status_code == 200


def test_replicas_of_ranks(start_server):
    with start_server(data_parallel_size=2, tensor_parallel_size=2) as server, start_server() as plain:
        assert len(engines(server)) == 2
        assert post(server, LONG).json()["choices"] == post(plain, LONG).json()["choices"]
