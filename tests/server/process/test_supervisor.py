"""An engine that is killed or hangs is restarted; running requests fail with an error or are run again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from aiakq.server.background import RunningServer

pytestmark = pytest.mark.process_failures

LONG = {"prompt": "A very long story begins", "temperature": 0, "max_tokens": 900, "ignore_eos": True}
SHORT = {"prompt": "Once", "temperature": 0, "max_tokens": 4}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> float:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() < began + seconds, "it did not come true in time"
        time.sleep(0.02)
    return time.monotonic() - began


def post(server: RunningServer, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)


def get(server: RunningServer, path: str) -> httpx.Response:
    return httpx.get(server.url + path, timeout=60, trust_env=False)


def running(server: RunningServer, metrics_of) -> float:
    return metrics_of(server.url)["vllm:num_requests_running"]


def engine_pid(server: RunningServer) -> int:
    return [event.engine_pid for event in server.events if event.engine_pid is not None][-1]


def starts_streaming(server, pool, body) -> tuple[list[str], Future[float]]:
    """A stream that has had its first tokens, and the moment it ends."""
    events: list[str] = []

    def read() -> float:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=120, trust_env=False
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line[6:])
        return time.monotonic()

    ended = pool.submit(read)
    wait_until(lambda: len(events) > 3)
    return events, ended


def code_of(event: str) -> str:
    return json.loads(event)["error"]["code"]


def test_a_killed_engine_is_replaced(start_server, metrics_of, pool):
    with start_server() as server:
        alone = post(server, LONG).json()["choices"][0]["text"]
        before = metrics_of(server.url)
        events, ended = starts_streaming(server, pool, LONG)
        waiting = pool.submit(post, server, LONG)  # has tokens, but its client has nothing yet
        wait_until(lambda: running(server, metrics_of) == 2)
        old = engine_pid(server)
        killed = time.monotonic()
        os.kill(old, signal.SIGKILL)
        assert wait_until(lambda: get(server, "/health").status_code == 503) < 5
        new = post(server, SHORT)
        assert new.status_code == 503 and new.json()["error"]["code"] == "engine_restarting"
        assert int(new.headers["retry-after"]) > 0 and "SIGKILL" in new.json()["error"]["message"]
        ready = get(server, "/ready")
        assert ready.status_code == 503 and set(ready.json()["loading"]) == {"seconds", "done"}
        assert ended.result() - killed < 5  # two seconds, and a slow machine
        assert code_of(events[-1]) == "engine_restarted" and "[DONE]" not in events
        wait_until(lambda: get(server, "/health").status_code == 200)
        assert get(server, "/ready").json() == {"ready": True}
        assert waiting.result().status_code == 200 and waiting.result().json()["choices"][0]["text"] == alone
        assert waiting.result().json()["usage"]["completion_tokens"] == 900
        assert engine_pid(server) != old
        after = metrics_of(server.url)
        grown = {name: value - before.get(name, 0) for name, value in after.items()}
        assert grown["aiakq:engine_restarts_total"] == 1
        assert grown["vllm:request_process_success_total"] == 1
        assert grown["vllm:request_process_fail_total"] == 2
        # Replayed work is not counted again.
        assert 900 < grown["vllm:generation_tokens_total"] <= 1800
        assert grown["vllm:request_generation_tokens_count"] == 1
        assert grown["vllm:time_to_first_token_seconds_count"] == 2
        assert after["vllm:kv_cache_usage_perc"] == after["vllm:num_requests_running"] == 0
        assert {event.kind for event in server.events} >= {"engine_dead", "engine_ready"}
        assert server.stop() == 0


def test_an_engine_is_not_restarted_with_another_model(start_server, tmp_path, example_model):
    """Its requests and its tokenizer belong to the model that the server was started with."""
    folder = tmp_path / "model"
    shutil.copytree(example_model, folder)
    with start_server(model=str(folder), max_engine_restarts=1) as server:
        assert post(server, SHORT).status_code == 200
        shutil.copy(example_model / "config.json", folder / "new.json")
        os.replace(folder / "new.json", folder / "config.json")
        os.kill(engine_pid(server), signal.SIGKILL)
        assert server.process.wait(60) == 9
        message = [event.message for event in server.events if event.kind == "engine_dead"][-1]
        assert f"The model '{folder}' changed while it was served: config.json." in message


def test_waiting_requests_survive_any_number_of_engine_restarts(start_server, metrics_of, pool):
    """A request that was in no step cannot be the cause."""
    with start_server(max_num_seqs=1) as server:
        first = pool.submit(post, server, LONG | {"n": 8})
        wait_until(lambda: running(server, metrics_of) == 1)
        second = pool.submit(post, server, SHORT)
        wait_until(lambda: metrics_of(server.url)["vllm:num_requests_waiting"] == 8)
        for _ in range(2):
            wait_until(lambda: running(server, metrics_of) == 1)
            old = engine_pid(server)
            os.kill(old, signal.SIGKILL)
            wait_until(lambda old=old: engine_pid(server) != old)
        assert first.result().status_code == 500
        assert first.result().json()["error"]["code"] == "request_quarantined"
        assert second.result().status_code == 200


def test_too_many_engine_restarts_end_the_server(start_server, metrics_of, pool):
    with start_server(max_engine_restarts=1) as server:
        old = engine_pid(server)
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: engine_pid(server) != old)
        waiting = pool.submit(post, server, LONG)
        events, ended = starts_streaming(server, pool, LONG)
        os.kill(engine_pid(server), signal.SIGKILL)
        assert waiting.result().status_code == 503 and waiting.result().json()["error"]["code"] == "engine_dead"
        ended.result()
        assert code_of(events[-1]) == "engine_dead"
        assert server.process.wait(20) == 9


def test_a_hanging_engine_is_replaced(start_server, pool):
    with start_server(step_timeout=1.0) as server:
        assert post(server, SHORT).status_code == 200
        events, ended = starts_streaming(server, pool, LONG)
        old = engine_pid(server)
        stopped = time.monotonic()
        os.kill(old, signal.SIGSTOP)
        assert ended.result() - stopped < 1.0 + 6  # the timeout, one second for its stacks, and a slow machine
        assert code_of(events[-1]) == "engine_timeout"
        wait_until(lambda: get(server, "/health").status_code == 200)
        assert post(server, SHORT).status_code == 200
        assert not os.path.exists(f"/proc/{old}")


def test_a_step_timeout_writes_the_stacks_of_the_engine(start_server, metrics_of, capfd):
    wanted = {"max_num_batched_tokens": 8192, "enable_prefix_caching": False}
    with start_server(step_timeout=0.1, **wanted) as server:
        prompts = [[5 + i] * 1000 for i in range(8)]
        # The first step has ten minutes, because it may compile kernels.
        assert post(server, {"prompt": prompts, "max_tokens": 1}).status_code == 200
        answer = post(server, {"prompt": prompts, "max_tokens": 1})
        assert answer.status_code == 200, "it was replayed, as a first step"
        assert metrics_of(server.url)["aiakq:engine_restarts_total"] >= 1
    said = capfd.readouterr().err
    assert "Fatal Python error: Aborted" in said and "runner.py" in said


def test_an_idle_engine_does_not_time_out(start_server):
    with start_server(step_timeout=0.3, first_step_timeout=0.3) as server:
        time.sleep(1.5)
        assert not any(event.kind == "engine_dead" for event in server.events)
        assert get(server, "/health").status_code == 200
