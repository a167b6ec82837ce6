"""A server whose model is distributed over ranks: a lost one fails open requests soon, and all are started anew."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

pytestmark = pytest.mark.process_failures

LONG = {"prompt": "A very long story begins", "temperature": 0, "max_tokens": 800, "ignore_eos": True}


def post(server, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)


def rank_pids(server) -> list[int]:
    """Children of the engine process."""
    engine = [event.engine_pid for event in server.events if event.engine_pid is not None][-1]
    return [child.pid for child in psutil.Process(engine).children()]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_and_the_group_is_started_anew(start_server, how):
    limit = 2.0 if how == signal.SIGSTOP else 30.0
    with (
        start_server(tensor_parallel_size=2, distributed_timeout_seconds=limit) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        alone = post(server, LONG).json()["choices"][0]["text"]
        (pid,) = rank_pids(server)
        events: list[str] = []

        def read() -> None:
            body = LONG | {"stream": True}
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False
            ) as answer:
                events.extend(line[6:] for line in answer.iter_lines() if line.startswith("data: "))

        ended = pool.submit(read)
        waiting = pool.submit(post, server, LONG)  # its client has no output yet, so it is replayed
        while len(events) < 4:
            time.sleep(0.01)
        lost = time.monotonic()
        os.kill(pid, how)
        ended.result()
        # Two seconds, the limit of one that hangs, and a slow machine.
        assert time.monotonic() - lost < 5 + (limit if how == signal.SIGSTOP else 0)
        assert "engine_restarted" in events[-1] and "Rank 1" in events[-1]
        assert waiting.result().json()["choices"][0]["text"] == alone
        (new,) = rank_pids(server)
        assert new != pid and not psutil.pid_exists(pid)
        assert server.stop() == 0
    assert not psutil.pid_exists(new)


def test_no_rank_outlives_a_killed_server(start_server):
    server = start_server(tensor_parallel_size=2)
    pids = rank_pids(server)
    server.kill()
    server.process.wait()
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
