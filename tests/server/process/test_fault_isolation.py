"""A request that fails inside the engine, or a reader that stalls, affects no other request."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from aiakq.server.background import RunningServer

GREEDY = {"prompt": "The old house", "temperature": 0, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def poison(example_model, tmp_path_factory) -> tuple[Path, int]:
    """The example model with one token whose embedding is not a number; the folder and the token's id."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("poisoned")
    shutil.copytree(example_model, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    token = 4000
    tensors["lm_head.weight"] = embedding.clone()
    embedding[token] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder, token


@pytest.fixture(scope="module")
def small(start_server, poison) -> Iterator[RunningServer]:
    with start_server(model=str(poison[0])) as running:
        yield running


@pytest.fixture
def api(small) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small.url, timeout=60, trust_env=False) as client:
        yield client


def test_a_failure_before_the_first_token_has_a_status(api, poison):
    alone = api.post("/v1/completions", json=GREEDY).json()["choices"][0]["text"]
    for stream in (False, True):
        answer = api.post("/v1/completions", json=GREEDY | {"prompt": [5, poison[1], 6], "stream": stream})
        assert answer.status_code == 500
        failure = answer.json()["error"]
        assert (failure["code"], failure["type"]) == ("numerical_error", "server_error")
        assert "not finite" in failure["message"]
    assert api.post("/v1/completions", json=GREEDY).json()["choices"][0]["text"] == alone


def test_a_failure_after_the_first_token_is_an_event_without_done(api, poison):
    body = GREEDY | {"logit_bias": {str(poison[1]): 100}, "stream": True}
    answer = api.post("/v1/completions", json=body)
    assert answer.status_code == 200
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert len(events) == 2 and "[DONE]" not in events
    assert json.loads(events[0])["choices"][0]["finish_reason"] is None
    assert json.loads(events[1])["error"]["code"] == "numerical_error"
    assert api.get("/health").status_code == 200


def test_a_client_whose_requests_all_overflow_does_not_end_the_engine(api, small, poison, metrics_of):
    for _ in range(4):
        assert api.post("/v1/completions", json=GREEDY | {"prompt": [5, poison[1]]}).status_code == 500
    assert api.post("/v1/completions", json=GREEDY).status_code == 200
    assert metrics_of(small.url)["aiakq:engine_restarts_total"] == 0


@pytest.mark.process_failures
def test_a_model_of_nothing_finite_ends_the_engine(start_server, poison, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(poison[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with start_server(model=str(tmp_path), max_engine_restarts=0) as server:
        codes = []
        for _ in range(3):
            answer = httpx.post(f"{server.url}/v1/completions", json=GREEDY, timeout=60, trust_env=False)
            codes.append(answer.json()["error"]["code"])
        assert codes == ["numerical_error", "numerical_error", "engine_dead"]
        assert "not finite, not even for a prompt of one token" in answer.json()["error"]["message"]
        assert server.process.wait(20) == 9
        assert any("not finite, not even" in event.message for event in server.events if event.kind == "engine_dead")


#: Runs before everything else in the engine process: after a failure, every kernel fails, like after a CUDA error.
_STICKY_DEVICE = """
import importlib.util, sys

class Finder:
    @classmethod
    def find_spec(cls, name, path, target=None):
        if name != "aiakq.runtime.executor.runner":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            real, failed = module.Runner.forward, []

            def forward(self, step):
                if failed or 4000 in step.token_ids.tolist():
                    failed.append(True)
                    raise RuntimeError("CUDA error: device-side assert triggered")
                return real(self, step)

            module.Runner.forward = forward

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.process_failures
def test_a_device_error_that_stays_ends_the_engine_and_not_the_server(start_server, tmp_path, monkeypatch, metrics_of):
    """No step can run after it, so the process is replaced. Requests without output are replayed, and one that breaks
    the new process too is not tried a third time.
    """
    (tmp_path / "sitecustomize.py").write_text(_STICKY_DEVICE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with start_server() as server:
        url = f"{server.url}/v1/completions"

        def ask(prompt: object) -> httpx.Response:
            return httpx.post(url, json=GREEDY | {"prompt": prompt, "max_tokens": 300}, timeout=120, trust_env=False)

        alone = ask("The old house").json()
        with ThreadPoolExecutor() as pool:
            beside = [pool.submit(ask, "The old house") for _ in range(3)]
            deadline = time.monotonic() + 30
            while metrics_of(server.url)["vllm:num_requests_running"] < 3:
                assert time.monotonic() < deadline
            bad = pool.submit(ask, [5, 4000, 6]).result()
            answers = [one.result() for one in beside]
        assert bad.status_code == 500 and bad.json()["error"]["code"] == "request_quarantined"
        # Concurrent requests of two deaths are quarantined too: they may have been the cause.
        codes = [one.json().get("error", {}).get("code") for one in answers]
        assert set(codes) <= {None, "request_quarantined"}
        while httpx.get(f"{server.url}/health", trust_env=False).status_code != 200:
            assert time.monotonic() < deadline + 60
            time.sleep(0.1)
        assert ask("The old house").json()["choices"] == alone["choices"]
        dead = [event.message for event in server.events if event.kind == "engine_dead"]
        assert len(dead) == 2 and all("device-side assert" in message for message in dead)
        assert metrics_of(server.url)["vllm:kv_cache_usage_perc"] == 0


def test_one_bad_prompt_of_several_fails_the_request_and_frees_the_rest(api, small, poison, metrics_of):
    prompts = [[5, 6, 7], [5, poison[1]]]
    answer = api.post("/v1/completions", json=GREEDY | {"prompt": prompts, "max_tokens": 500})
    assert answer.status_code == 500
    deadline = time.monotonic() + 2
    while metrics_of(small.url)["vllm:num_requests_running"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert metrics_of(small.url)["vllm:kv_cache_usage_perc"] == 0


def test_pages_of_a_failed_prompt_are_not_reused(api, poison):
    """Another prompt shares its prefix, but it is not known which pages are valid."""
    beginning = [5 + index % 50 for index in range(64)]
    wanted = GREEDY | {"prompt": [*beginning, 7]}
    alone = api.post("/v1/completions", json=wanted).json()
    again = api.post("/v1/completions", json=wanted).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert api.post("/v1/completions", json=wanted | {"prompt": [*beginning, poison[1]]}).status_code == 500
    after = api.post("/v1/completions", json=wanted).json()
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert after["choices"][0]["text"] == again["choices"][0]["text"] == alone["choices"][0]["text"]


def test_a_reader_that_stalls_gets_everything_later(api, small):
    """The response exceeds every socket buffer; other requests are served meanwhile, and no token is lost."""
    wanted = {"n": 3, "max_tokens": 600, "logprobs": 5, "return_token_ids": True}
    host, port = small.url.removeprefix("http://").split(":")
    body = json.dumps(GREEDY | wanted | {"stream": True}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        head = f"host: {host}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        head = "POST /v1/completions HTTP/1.1\r\n" + head
        connection.sendall(head.encode() + body)
        whole = api.post("/v1/completions", json=GREEDY | wanted | {"n": 1, "logprobs": None}).json()
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    events = [line[6:] for line in received.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    tokens: list[list[int]] = [[], [], []]
    for event in events[:-1]:
        choice = json.loads(event)["choices"][0]
        tokens[choice["index"]] += choice["token_ids"]
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    assert tokens == [whole["choices"][0]["token_ids"]] * 3
