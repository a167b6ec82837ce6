"""Limits of the queue in sequences, tokens and time, and of output that a reader does not read."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from aiakq.errors import error
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.request import Prompt, Request, RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import OutputProcessor
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.background import RunningServer
from aiakq.server.process.request_manager import QueueLimits, RequestManager
from aiakq.server.process.request_stream import RequestStream
from aiakq.server.telemetry.metrics import Metrics

LONG = {"prompt": "Long", "temperature": 0, "max_tokens": 900, "ignore_eos": True}
SHORT = {"prompt": "Once", "temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def narrow(start_server) -> Iterator[RunningServer]:
    """A server that runs one sequence at a time, with a short queue."""
    limits = {"max_num_queued_reqs": 16, "max_num_queued_tokens": 100, "max_queue_seconds": 600}
    with start_server(max_num_seqs=1, **limits) as running:
        yield running


@pytest.fixture(scope="module")
def impatient(start_server) -> Iterator[RunningServer]:
    """A server that runs one sequence at a time, with little time for waiting and running."""
    with start_server(max_num_seqs=1, max_queue_seconds=1, max_request_seconds=3) as running:
        yield running


def post(server: RunningServer, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)


def refused(answer: httpx.Response, code: str) -> str:
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    failure = answer.json()["error"]
    assert (failure["code"], failure["type"]) == (code, "service_unavailable_error")
    return failure["message"]


def wait_for(server: RunningServer, metrics_of, name: str, value: float) -> None:
    deadline = time.monotonic() + 30
    while metrics_of(server.url)[f"vllm:{name}"] != value:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_requests_of_more_sequences_than_the_queue_holds_are_refused(narrow, metrics_of):
    two = {"prompt": ["Once", "Twice"], "max_tokens": 1}
    assert "--max-num-queued-reqs" in refused(post(narrow, two | {"n": 9}), "overloaded")
    assert post(narrow, two | {"n": 8}).status_code == 200
    assert metrics_of(narrow.url)["vllm:admission_rejections_total{reason=queue_full}"] >= 1


def test_requests_of_more_tokens_than_the_queue_holds_are_refused(narrow, metrics_of):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(post, narrow, LONG)
        wait_for(narrow, metrics_of, "num_requests_running", 1)
        waiting = pool.submit(post, narrow, {"prompt": [5] * 90, "max_tokens": 1})
        wait_for(narrow, metrics_of, "num_requests_waiting", 1)
        assert "--max-num-queued-tokens" in refused(post(narrow, {"prompt": [5] * 11, "max_tokens": 1}), "overloaded")
        fitting = pool.submit(post, narrow, {"prompt": [5] * 5, "max_tokens": 1})
        assert [one.result().status_code for one in (running, waiting, fitting)] == [200, 200, 200]
    # A prompt of any length is accepted while no other waits.
    assert post(narrow, {"prompt": [5] * 900, "max_tokens": 1}).status_code == 200


def test_requests_that_wait_or_run_for_too_long_fail(impatient, metrics_of):
    before = metrics_of(impatient.url)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(post, impatient, LONG | {"n": 16})
        wait_for(impatient, metrics_of, "num_requests_running", 1)
        began = time.monotonic()
        assert "--max-queue-seconds" in refused(post(impatient, SHORT), "queue_timeout")
        assert 0.9 < time.monotonic() - began
        assert "--max-request-seconds" in refused(first.result(), "time_limit")
    after = metrics_of(impatient.url)
    name = "vllm:admission_rejections_total{reason=queue_timeout}"
    assert after[name] - before[name] == 1
    wait_for(impatient, metrics_of, "num_requests_waiting", 0)
    wait_for(impatient, metrics_of, "kv_cache_usage_perc", 0)
    assert post(impatient, SHORT).status_code == 200


def test_a_stream_that_runs_for_too_long_ends_with_an_error(impatient):
    with httpx.stream(
        "POST", f"{impatient.url}/v1/completions", json=LONG | {"n": 16, "stream": True}, timeout=60, trust_env=False
    ) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert len(events) > 2 and json.loads(events[-1])["error"]["code"] == "time_limit"


def test_a_reader_that_leaves_a_mebibyte_unread_loses_its_request(server, metrics_of):
    """Its request is aborted at once. It can still read the output so far, and then the reason."""
    body = json.dumps(LONG | {"n": 16, "logprobs": 20, "stream": True}).encode()
    host, port = re.fullmatch(r"http://(.+):(\d+)", server.url).groups()
    before = metrics_of(server.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(server, metrics_of, "num_requests_running", 16)
        wait_for(server, metrics_of, "num_requests_running", 0)
        wait_for(server, metrics_of, "kv_cache_usage_perc", 0)
        grown = metrics_of(server.url)["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
        assert grown < 16 * 900 / 2, "the rest was not generated"
        connection.settimeout(30)
        received = b"".join(iter(lambda: connection.recv(1 << 20), b"")).decode()
    events = [line[6:] for line in received.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1])["error"]["code"] == "slow_reader" and "[DONE]" not in events


class Processor:
    """The output processor that a manager uses: every request has one sequence."""

    limits: Any = None

    def add(self, prompt_id: str, prompt: Prompt, request: Request, key: str) -> list[RequestSpec]:
        return [RequestSpec(f"{prompt_id}-0", prompt.token_ids, request.params, 5, 0, options=request.options)]

    def cancel(self, prompt_id: str) -> list[str]:
        return [f"{prompt_id}-0"]


class Engines:
    """A manager, and engines that end."""

    def __init__(self) -> None:
        metrics = Metrics("base", 100, {"block_size": "16"}).of_engine(0)
        self.limits = ModelLimits(100, 200, 300)
        self.manager = RequestManager(Processor(), self.limits, metrics, QueueLimits(9, 9, 900, 60, 60))  # type: ignore[arg-type]
        self.start()

    def start(self) -> None:
        self.manager.on_engine_ready(lambda record: None, self.limits)

    def ask(self) -> RequestStream:
        options = RequestOptions()
        return self.manager.start(
            Request("r", [Prompt(None, [1])], SamplingParams(), options, time.monotonic(), final_only=True)
        )

    def run(self, stream: RequestStream) -> None:
        self.manager.on_start([f"{prompt_id}-0" for prompt_id in stream.prompt_ids])

    def end(self) -> None:
        ended = error("engine_restarting", reason="it was ended by SIGKILL")
        self.manager.on_engine_end(ended, ended, replay=True)


def test_a_request_that_two_engines_received_and_did_not_run_is_not_given_to_a_third():
    """Such as one whose arrival exhausts memory: the engine is killed before any of its sequences starts."""
    engines = Engines()
    stream = engines.ask()
    engines.end()
    assert stream.failure is None
    engines.end()  # the next one ended while it was loading, and had not received the request
    assert stream.failure is None
    engines.start()
    engines.end()
    assert stream.failure is not None and stream.failure.id == "request_quarantined"


def test_a_waiting_request_is_not_blamed_for_the_end_of_engines_that_run_others():
    engines = Engines()
    running, waiting = engines.ask(), engines.ask()
    for _ in range(2):
        engines.run(running)
        engines.end()
        engines.start()
    assert running.failure is not None and running.failure.id == "request_quarantined"
    assert waiting.failure is None


def test_all_prompts_of_a_request_have_one_group_and_no_other_request_has_it(byte_tokenizer):
    """Also if clients choose equal request ids."""
    limits = ModelLimits(320, 200, 300)
    metrics = Metrics("base", 100, {"block_size": "16"}).of_engine(0)
    queue = QueueLimits(9, 9, 900, 60, 60)
    manager = RequestManager(OutputProcessor(Tokenizer(byte_tokenizer), limits), limits, metrics, queue)
    sent: list[Any] = []
    manager.on_engine_ready(sent.append, limits)
    for _ in range(2):
        prompts = [Prompt(None, [1]), Prompt(None, [2])]
        params = SamplingParams(n=2, max_tokens=1)
        manager.start(Request("same", prompts, params, RequestOptions(), time.monotonic()))
    groups = [{spec.group for spec in submitted.specs()} for submitted in sent]
    assert [len(each) for each in groups] == [1, 1] and len(groups[0] | groups[1]) == 2
    assert all(len(submitted.specs()) == 4 for submitted in sent)
