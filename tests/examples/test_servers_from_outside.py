"""The scripts that test the server with other programs, without those programs."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from aiakq.server.background import start_in_background

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (EXAMPLES, EXAMPLES / "peers", EXAMPLES / "lm_eval"):
        monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    "words",
    [
        ["bench_server.py", "--peers", "no-such-folder"],
        ["lm_eval/compare.py", "--lm-eval", "no-such-program"],
        ["../tests/server/trace_collector.py", "--phoenix", "no-such-program"],
    ],
)
def test_a_missing_program_is_reported_in_one_line(words: list[str]) -> None:
    command = [sys.executable, str(EXAMPLES / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 1 and not done.stdout


def test_the_data_of_the_tasks_is_what_the_script_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import compare

    monkeypatch.setattr(compare, "FOLDER", tmp_path)
    compare.write_data()
    for name in ("continuation.jsonl", "text.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLES / "lm_eval" / name).read_bytes()


def test_scores_through_a_server_are_those_computed_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm_eval's requests (token ids, echo, logprobs 1, one token more), summed as it sums them."""
    import compare

    rows = {name: compare.read(name)[:3] for name in ("text.jsonl", "continuation.jsonl")}
    monkeypatch.setattr(compare, "read", rows.__getitem__)
    passages = rows["text.jsonl"]
    direct = compare.directly()["tinybooks_text bits_per_byte"]
    arguments = {"model": str(compare.MODEL), "served_model_name": ["tinybooks"], "dtype": "float32"}
    with start_in_background(arguments, timeout=240) as server:
        total = 0.0
        for passage in passages:
            body: dict[str, Any] = {"prompt": passage["text"], "add_special_tokens": False}
            ids = httpx.post(f"{server.url}/tokenize", json=body, trust_env=False).json()["tokens"]
            request = {"prompt": [0, *ids], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
            answer = httpx.post(f"{server.url}/v1/completions", json=request, timeout=60, trust_env=False).json()
            total += sum(answer["choices"][0]["logprobs"]["token_logprobs"][1:-1])
    size = sum(len(passage["text"].encode()) for passage in passages)
    assert math.isclose(-total / size / math.log(2), direct, rel_tol=1e-5)


def test_the_counter_watch_equals_the_counters_of_the_server() -> None:
    import bench_server

    with bench_server.aiakq_server(Path()) as url:
        body = {"prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        with bench_server.CounterWatch(url) as watch:
            for _ in range(5):
                assert httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200
        assert watch.increase("request_process_success_total") == 5
        assert watch.increase("generation_tokens_total") == 40
        assert 0 < watch.mean_ms("inter_token_latency_seconds") < watch.mean_ms("e2e_request_latency_seconds")
        assert watch.began and watch.ended
