"""Several client processes: how requests are split, and that they measure the same as one process."""

from __future__ import annotations

import pytest

from aiakq.bench import client_processes, serve
from aiakq.bench.client import Endpoint
from aiakq.bench.client_processes import Partition, split
from aiakq.bench.serve import ServeOptions
from aiakq.bench.workload import WorkloadRequest
from aiakq.errors import AiakqError


def whole_of(requests: list[WorkloadRequest], max_concurrency: int | None = None) -> Partition:
    offsets = [float(index) for index in range(len(requests))]
    endpoint = Endpoint("/v1/completions", "m", True)
    return Partition("http://x", None, 1.0, endpoint, requests, offsets, list(range(len(requests))), max_concurrency)


def test_requests_are_split_evenly_and_keep_their_times():
    partitions = split(whole_of([WorkloadRequest(str(index), 1) for index in range(7)], max_concurrency=5), 3)
    assert [partition.indices for partition in partitions] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [partition.offsets for partition in partitions] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [partition.max_concurrency for partition in partitions] == [2, 2, 1]


def test_conversations_stay_together():
    follows = [None, None, 0, 1, 2, 3]
    partitions = split(
        whole_of([WorkloadRequest(str(index), 1, follows=before) for index, before in enumerate(follows)]), 4
    )
    assert [partition.indices for partition in partitions] == [[0, 2, 4], [1, 3, 5]]
    assert [request.follows for request in partitions[1].requests] == [None, 0, 1]


def run(url: str, **options) -> dict:
    settings = {"num_prompts": 6, "input_len": 20, "output_len": 6, "client_processes": 2, **options}
    return serve.run(ServeOptions(base_url=url, **settings), lambda *known: None).document()


def test_together_they_measure_every_request_at_its_time(bench_server):
    document = run(bench_server.url, request_rate=20.0, burstiness=float("inf"), save_detailed=True)
    assert (document["completed"], document["total_output_tokens"]) == (6, 36)
    detailed = document["detailed"]
    due = [start - wait for start, wait in zip(detailed["start_times"], detailed["queue_times"], strict=True)]
    assert due == pytest.approx([(index + 1) / 20 for index in range(6)])
    assert 0 < document["ttft_ms"]["p50"] <= document["e2el_ms"]["p50"] < 10_000
    assert document["client_lag_ms"]["p50"] is not None and document["prefix_cache"]["hits"] == 0


def test_the_time_that_processes_take_to_start_is_not_measured(bench_server, monkeypatch):
    monkeypatch.setattr(client_processes, "_CODE", f"import time; time.sleep(3); {client_processes._CODE}")
    assert run(bench_server.url)["duration"] < 3


def test_a_process_that_ends_is_an_error(bench_server, monkeypatch):
    monkeypatch.setattr(client_processes, "_CODE", "raise SystemExit(3)")
    with pytest.raises(AiakqError, match="a process of --client-processes exited"):
        run(bench_server.url)


@pytest.mark.parametrize("workload", ["random", "dataset"])
def test_a_number_is_kept_in_flight_for_a_time(bench_server, tmp_path, workload):
    options: dict = {"num_prompts": None, "duration_s": 0.6, "max_concurrency": 3, "workload": workload, "seed": 7}
    if workload == "dataset":
        options["dataset"] = tmp_path / "prompts.txt"
        options["dataset"].write_text("One\nTwo\nThree\nFour\n")
    document = run(bench_server.url, **options)
    assert document["failed"] == 0 and document["completed"] >= 3 and 2 <= document["max_concurrent_requests"] <= 3
    assert document["duration"] >= 0.6
    if workload == "random":  # no process repeats the prompts of another
        assert document["prefix_cache"]["hits"] == 0


def test_errors_end_the_load_in_all_processes(bench_server):
    options = {"num_prompts": None, "duration_s": 60.0, "max_concurrency": 2, "num_warmups": 0, "max_errors": 4}
    document = run(bench_server.url, extra_body={"temperature": -1}, **options)
    assert "requests failed (--max-errors)" in document["stopped"]
    assert document["failed"] >= 4 and document["duration"] < 30
