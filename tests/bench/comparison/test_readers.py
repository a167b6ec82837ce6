"""Readers of results: ours, vLLM's and GuideLLM's, files and folders."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from aiakq.bench.comparison.readers import join_runs, read_side
from aiakq.bench.latency import measure as measure_latency
from aiakq.bench.serve import measure
from aiakq.errors import AiakqError
from aiakq.records import Record

VLLM = {
    "date": "20261101-120000",
    "backend": "vllm",
    "model_id": "m",
    "num_prompts": 64,
    "completed": 64,
    "request_throughput": 3.0,
    "output_throughput": 384.0,
    "total_token_throughput": 1000.0,
    "mean_ttft_ms": 120.0,
    "median_ttft_ms": 100.0,
    "std_ttft_ms": 40.0,
    "p99_ttft_ms": 300.0,
    "mean_tpot_ms": 12.0,
    "median_tpot_ms": 11.0,
    "std_tpot_ms": 2.0,
}


def distribution(mean: float, count: int = 50) -> dict:
    return {"mean": mean, "std_dev": mean / 5, "count": count, "percentiles": {"p50": mean * 0.9, "p99": mean * 2}}


def guidellm(*rates: float) -> dict:
    metrics = [
        {
            "time_to_first_token_ms": {"successful": distribution(100.0 * rate)},
            "inter_token_latency_ms": {"successful": distribution(10.0)},
            "time_per_output_token_ms": {"successful": distribution(99.0)},
            "request_latency": {"successful": distribution(1.5)},
            "output_tokens_per_second": {"successful": {"mean": 500.0}},
        }
        for rate in rates
    ]
    return {"metadata": {"version": 2}, "benchmarks": [{"metrics": each} for each in metrics]}


@pytest.fixture
def write(tmp_path):
    def write(document, name: str = "a.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(document))
        return path

    return write


def test_a_file_of_vllm_has_errors_of_means(write):
    result = read_side(write(VLLM))
    assert (result.tool, result.kind) == ("vllm", "serve")
    assert result.metrics["ttft_ms.p50"].value == 100.0 and result.metrics["ttft_ms.p50"].error is None
    mean = result.metrics["ttft_ms.mean"]
    assert mean.error == pytest.approx(40 / 120 / 8) and mean.over == "requests"
    assert result.metrics["output_throughput"].value == 384.0
    assert result.settings["num_prompts"] == 64 and result.machine == {}


def test_details_of_vllm_give_errors_of_percentiles(write):
    result = read_side(write({**VLLM, "ttfts": [0.05 + 0.001 * i for i in range(64)]}))
    low, high = 0.05 + 0.001 * 27, 0.05 + 0.001 * 36
    assert result.metrics["ttft_ms.p50"].error == pytest.approx(math.log(high / low) / 2)
    assert result.metrics["ttft_ms.p99"].error is None  # 64 requests say little about it


def test_latency_and_throughput_of_vllm(write):
    latency = read_side(write({"avg_latency": 2.0, "latencies": [1.9, 2.1, 2.0], "percentiles": {"50": 2.0}}))
    assert latency.kind == "latency" and latency.metrics["latency_ms.mean"].count == 3
    throughput = read_side(write({"elapsed_time": 2.0, "requests_per_second": 4.0, "tokens_per_second": 9.0}))
    assert throughput.metrics["request_throughput"].value == 4.0


def test_a_file_of_guidellm_in_our_names_and_units(write):
    result = read_side(write(guidellm(1.0)))
    assert result.tool == "guidellm"
    assert result.metrics["tpot_ms.mean"].value == 10.0  # theirs called per output token counts the first one, too
    assert result.metrics["e2el_ms.p50"].value == pytest.approx(1350.0)
    assert result.metrics["ttft_ms.mean"].error == pytest.approx(0.2 / math.sqrt(50))


def test_one_of_several_benchmarks_of_guidellm_is_chosen(write):
    path = write(guidellm(1.0, 2.0))
    with pytest.raises(AiakqError, match="contains 2 benchmarks"):
        read_side(path)
    assert read_side(path.with_name("a.json#1")).metrics["ttft_ms.mean"].value == 200.0
    with pytest.raises(AiakqError) as caught:
        read_side(path.with_name("a.json#2"))
    assert caught.value.id == "no_result"


def test_a_record_that_guidellm_wrote():
    """Of GuideLLM 0.8.1 against ``aiakq serve``: two streams, 12 requests of 8 tokens; single requests are left out."""
    result = read_side(Path(__file__).with_name("guidellm-0.8.1.json"))
    assert result.settings == {"type_": "concurrent", "streams": 2}
    assert {f"{name}_ms.{kind}" for name in ("ttft", "tpot", "e2el") for kind in ("mean", "p50", "p99")} <= set(
        result.metrics
    )
    assert {"request_throughput", "output_throughput", "total_token_throughput"} <= set(result.metrics)
    # Its distribution of times per token has 7 of each request; only the requests are independent.
    assert result.metrics["tpot_ms.mean"].count == 12
    median = result.metrics["ttft_ms.p50"]
    assert math.exp(2 * 1.96 * median.error) == pytest.approx(116.236 / 31.141, rel=1e-3)


def test_a_record_that_vllm_wrote():
    """Of ``vllm bench serve --save-detailed`` 0.33 against ``aiakq serve``: 12 requests of 8 tokens, two in flight."""
    result = read_side(Path(__file__).with_name("vllm-0.33.json"))
    assert (result.tool, result.kind, result.settings["max_concurrency"]) == ("vllm", "serve", 2)
    for name in ("ttft", "tpot", "e2el"):
        for kind in ("mean", "p50"):
            found = result.metrics[f"{name}_ms.{kind}"]
            assert (found.count, found.over) == (12, "requests") and found.error
    assert result.metrics["e2el_ms.p50"].value == pytest.approx(31.1865, rel=1e-4)
    assert result.metrics["output_throughput"].value == pytest.approx(451.254, rel=1e-4)


def test_our_records_give_metrics_and_machine(write):
    metrics = measure([], 1.0, {})
    metrics.update(completed=9, mean_ttft_ms=10.0, std_ttft_ms=3.0, p50_ttft_ms=9.0, output_throughput=50.0)
    environment = {"commit": "abc", "device_name": "CPU X", "cpu_count": 2, "threads": None}
    result = read_side(write(Record("serve", 1, {"input_len": 8}, metrics, environment).document()))
    assert result.metrics["ttft_ms.mean"].error == pytest.approx(0.1)
    assert "e2el_ms.mean" not in result.metrics  # was not measured
    assert result.machine == {"device_name": "CPU X", "cpu_count": 2} and "abc" in result.label


def test_batches_of_a_latency_record_give_intervals(write):
    record = Record("latency", 1, {}, measure_latency([1.0, 1.1, 1.2, 1.1, 1.0, 1.05], []), {})
    result = read_side(write(record.document()))
    assert result.metrics["latency_ms.p50"].error is not None
    assert result.metrics["latency_ms.mean"].count == 6


def test_a_folder_holds_runs(write, tmp_path):
    for number, mean in enumerate((100.0, 110.0, 105.0)):
        write({**VLLM, "mean_ttft_ms": mean}, f"runs/{number}.json")
    result = read_side(tmp_path / "runs")
    assert result.metrics["ttft_ms.mean"].over == "runs" and result.metrics["ttft_ms.mean"].count == 3
    assert result.metrics["output_throughput"].freedom == 2


def test_runs_of_different_benchmarks_are_not_joined(write, tmp_path):
    write(VLLM, "runs/0.json")
    write(guidellm(1.0), "runs/1.json")
    with pytest.raises(AiakqError, match="not runs of the same benchmark"):
        read_side(tmp_path / "runs")


def test_only_counters_that_all_runs_share_are_kept(write):
    runs = [
        read_side(write(Record("counters", 0, {}, {"counters": {"steps": 5, "noisy": value}}, {}).document()))
        for value in (1, 2)
    ]
    assert join_runs("both", runs).counters == {"steps": 5}


@pytest.mark.parametrize("content", ["{}", "[]", "no json", '{"schema_version": 1}', '{"benchmarks": []}'])
def test_what_is_no_result_is_refused(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(AiakqError) as caught:
        read_side(path)
    assert caught.value.id == "no_result"


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(AiakqError, match=r"has no \*.json"):
        read_side(tmp_path)


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(AiakqError) as caught:
        read_side(tmp_path / "gone.json")
    assert caught.value.id == "usage" and "gone.json cannot be read: No such file" in str(caught.value)
