"""``bench serve --compare-speculation`` against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from aiakq.bench import served_drafts
from aiakq.bench.serve import ServeOptions
from aiakq.cli import main
from aiakq.errors import AiakqError
from aiakq.server.background import RunningServer

LOAD = {"num_prompts": 3, "input_len": 24, "output_len": 120, "num_warmups": 0}


@pytest.fixture(scope="module")
def drafting_server(start_bench_server) -> Iterator[RunningServer]:
    with start_bench_server(speculative_model="[ngram]", enable_admin_routes=True) as running:
        yield running


def run(url: str, rounds: int, **options) -> dict:
    stages: list[str] = []

    def progress(stage: str):
        stages.append(stage)
        return lambda done, total, failed: None

    record = served_drafts.run(ServeOptions(base_url=url, **LOAD | options), rounds, progress)
    expected = ["with", "without", "without", "with"][: 2 * rounds]
    assert [stage.split(", ")[1] for stage in stages] == [f"{each} drafts" for each in expected]
    return record.document()


def test_the_same_load_runs_in_turns_with_and_without_drafts(drafting_server):
    document = run(drafting_server.url, 2, seed=7)
    found = document["speculation"]
    assert document["completed"] == 2 * 3 and document["total_output_tokens"] == 2 * 3 * 120
    assert document["prefix_cache"]["hits"] == 0 and document["config"]["compare_rounds"] == 2
    assert len(found["speedups"]) == 2 and found["speedup"] == pytest.approx(sum(found["speedups"]) / 2)
    assert found["speedup_interval"]["low"] <= found["speedup"] <= found["speedup_interval"]["high"]
    assert found["tpot_speedup"] > 0 and found["output_throughput_without"] > 0
    assert found["num_drafts"] > 0 and found["acceptance_by_position"][0] > 0
    assert served_drafts.NO_DRAFTS not in document["warnings"]


def test_runs_without_drafts_have_none(drafting_server):
    with httpx.Client(base_url=drafting_server.url, timeout=60, trust_env=False) as client:
        body = {"prompt": [5, 6, 7] * 20, "max_tokens": 100, "temperature": 0, "ignore_eos": True}

        def drafts() -> tuple[float, str]:
            text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
            return _counter(client), text

        before, text = drafts()
        assert client.post("/speculation", json={"enabled": False}).status_code == 200
        assert drafts() == (before, text)
        assert client.post("/speculation", json={"enabled": True}).status_code == 200
        after, same = drafts()
        assert after > before and same == text
        assert client.post("/speculation", json={}).status_code == 400


def _counter(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:spec_decode_num_draft_tokens_total"))


def test_a_server_without_admin_routes_is_refused_with_the_remedy(bench_server):
    with pytest.raises(AiakqError, match="enable-admin-routes"):
        run(bench_server.url, 1)


def test_a_server_without_speculation_is_remarked(example_model, capsys):
    """The command starts a server with admin routes."""
    words = ["bench", "serve", str(example_model), "--dtype", "float32", "--num-gpu-blocks-override", "129"]
    load = ["--num-prompts", "1", "--input-len", "8", "--output-len", "4", "--num-warmups", "0"]
    assert main([*words, *load, "--compare-speculation", "--compare-rounds", "1"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert served_drafts.NO_DRAFTS in document["warnings"] and document["speculation"]["speedup"] > 0
    assert "speedup from drafts" in err


@pytest.mark.parametrize("nothing", [0.0, None])
def test_runs_whose_tokens_arrive_at_once_have_no_speedup(nothing):
    """On a busy machine, the client reads several tokens at the same time."""
    run = {"mean_tpot_ms": 2.0, "output_throughput": 100.0}
    for drafting, plain in ([run | {"mean_tpot_ms": nothing}], [run]), ([run], [run | {"mean_tpot_ms": nothing}]):
        found: dict[str, Any] = {}
        served_drafts._add_comparison(found, drafting, plain)
        assert found["tpot_speedup"] is None and found["speedup"] == 1


def test_a_comparison_is_not_repeated(bench_server, capsys):
    words = ["bench", "serve", "--base-url", bench_server.url, "--compare-speculation", "--repeats", "2"]
    assert main(words) == 2
    assert "--compare-rounds" in capsys.readouterr().err
