"""Async scheduling: a server whose engine prepares the next step while one is running."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from aiakq.arguments.engine import EngineArguments
from aiakq.server.process import engine_process
from aiakq.server.process.ipc import EngineChannel, FromEngine, Loading, Start, ToEngine
from aiakq.system.channel import Channel

PROMPT = "It was the best of times, it was"
ASKED = [
    {"temperature": 0, "max_tokens": 24, "logprobs": 2},
    {"temperature": 0.9, "seed": 4, "max_tokens": 20, "n": 2},
    {"temperature": 0.9, "seed": 5, "max_tokens": 60, "stop": ["the", "."]},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 1.0, "seed": 6, "max_tokens": 16, "frequency_penalty": 0.7, "top_p": 0.8},
    {"temperature": 0, "max_tokens": 0, "echo": True, "logprobs": 1},
]


def answers(url: str) -> list:
    """Send all requests at once; return the responses without their ids."""

    def ask(fields: dict) -> list:
        body = {"model": "tinybooks", "prompt": PROMPT} | fields
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    with ThreadPoolExecutor(len(ASKED)) as pool:
        return list(pool.map(ask, ASKED))


def test_async_scheduling_does_not_change_responses(server, start_server, metrics_of):
    with start_server(async_scheduling=True) as ahead:
        assert answers(ahead.url) == answers(server.url)
        body = {"model": "tinybooks", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        # A client that disconnects: its pending tokens are dropped and its pages freed.
        with httpx.stream("POST", f"{ahead.url}/v1/completions", json=body, timeout=60, trust_env=False) as stream:
            next(stream.iter_lines())
        assert answers(ahead.url) == answers(server.url)
        samples = metrics_of(ahead.url)
        assert samples["vllm:num_requests_running"] == samples["vllm:gpu_cache_usage_perc"] == 0


@pytest.mark.process_failures
def test_an_engine_in_a_long_step_ends_with_a_killed_server(start_server):
    """A stopped process behaves like a step that holds every lock."""
    server = start_server(num_gpu_blocks_override=65)
    engine = server.ready.engine_pid
    os.kill(engine, signal.SIGSTOP)
    server.kill()
    deadline = time.monotonic() + 2

    def is_running() -> bool:
        try:
            return Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    try:
        while is_running():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        if is_running():
            os.kill(engine, signal.SIGKILL)
        server.process.wait()


@pytest.mark.process_failures
@pytest.mark.parametrize("is_gone", [True, False])
def test_only_a_load_that_fails_by_itself_shows_a_traceback(monkeypatch, capsys, is_gone):
    """The end of the server while the model is loading is not an error of the engine."""
    ours, theirs = socket.socketpair()
    server = Channel[ToEngine, FromEngine](theirs, FromEngine)
    server.send(Start(EngineArguments()))

    def load(channel: EngineChannel, start: Start) -> None:
        if is_gone:
            theirs.close()
            channel.send(Loading("weights", 1.0, "read"))
        raise ConnectionResetError("a mirror of the hub hung up")

    monkeypatch.setattr(engine_process, "_load", load)
    code = engine_process._run(EngineChannel(ours, ToEngine))
    shown = capsys.readouterr().err
    assert (code, shown) == (0, "") if is_gone else code != 0 and "a mirror of the hub hung up" in shown
    theirs.close()
