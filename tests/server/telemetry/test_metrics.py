"""/metrics: every documented name, with exact counts."""

from __future__ import annotations

import re
import time

import pytest

from aiakq.runtime.protocol.output import DraftCounts, EngineStats
from aiakq.server.telemetry.metrics import Metrics

COUNTERS = """
request_total request_process_success_total request_process_fail_total num_preemptions_total prompt_tokens_total
generation_tokens_total prompt_tokens_cached_total prefix_cache_queries_total prefix_cache_hits_total
gpu_prefix_cache_queries_total gpu_prefix_cache_hits_total spec_decode_num_drafts_total
spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total spec_decode_num_emitted_tokens_total
""".split()
GAUGES = """
num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc spec_decode_draft_acceptance_rate
spec_decode_efficiency
""".split()
HISTOGRAMS = """
e2e_request_latency_seconds inference_compute_infer_duration request_inference_time_seconds time_to_first_token_seconds
time_per_output_token_seconds request_time_per_output_token_seconds inter_token_latency_seconds request_prompt_tokens
request_generation_tokens request_max_num_generation_tokens request_params_n request_params_max_tokens
request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds request_num_preemptions
iteration_tokens_total
""".split()


@pytest.fixture
def change(server, metrics_of):
    """``change()`` -> what every sample grew by since the test began, once the server is idle."""
    before = metrics_of(server.url)

    def since() -> dict[str, float]:
        for _ in range(100):
            now = metrics_of(server.url)
            if now["vllm:num_requests_running"] == 0:
                break
            time.sleep(0.05)
        return {name: value - before.get(name, 0) for name, value in now.items()}

    return since


def test_every_metric_is_exported_from_the_start(http, metrics_of, server):
    samples = metrics_of(server.url)
    for name in COUNTERS + GAUGES:
        assert f"vllm:{name}" in samples
    for name in HISTOGRAMS:
        assert f"vllm:{name}_count" in samples and f"vllm:{name}_sum" in samples
    for reason in ("stop", "length", "abort", "error"):
        assert f"vllm:request_success_total{{finished_reason={reason}}}" in samples
    for reason in ("queue_full", "queue_timeout", "unavailable"):
        assert f"vllm:admission_rejections_total{{reason={reason}}}" in samples
    for name in ("lora_count", "lora_time_e2e_requests"):
        assert samples[f"vllm:{name}{{lora_name=}}"] == 0
    assert "aiakq:engine_restarts_total" in samples
    text = http.get("/metrics").text
    assert 'vllm:num_requests_running{engine="0",model_name="tinybooks"} ' in text
    [info] = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    labels = dict(re.findall(r'(\w+)="([^"]*)"', info))
    assert labels["block_size"] == "16" and labels["cache_dtype"] == "float32"
    tokens = int(labels["kv_cache_size_tokens"])
    assert tokens == 16 * int(labels["num_gpu_blocks"]) > 0
    assert float(labels["kv_cache_max_concurrency"]) == round(tokens / 1024, 2)
    assert http.get("/metrics").headers["content-type"].startswith("text/plain")


def test_metrics_count_requests_sequences_and_tokens_exactly(http, change):
    body = {"prompt": "A story of counting.", "temperature": 0, "max_tokens": 6, "ignore_eos": True, "n": 2}
    usage = http.post("/v1/completions", json=body).json()["usage"]
    assert http.post("/v1/completions", json=body | {"stream": True, "n": 1, "max_tokens": 1}).status_code == 200
    grown = change()

    def value(name: str) -> float:
        return grown[f"vllm:{name}"]

    assert value("request_total") == value("request_process_success_total") == 2
    assert value("request_success_total{finished_reason=length}") == 2
    assert value("request_process_fail_total") == value("request_success_total{finished_reason=stop}") == 0
    assert value("e2e_request_latency_seconds_count") == 2
    assert (value("request_params_n_count"), value("request_params_n_sum")) == (2, 3)
    # per sequence: two of six tokens, one of one
    assert value("prompt_tokens_total") == value("request_prompt_tokens_sum") == 3 * usage["prompt_tokens"]
    assert value("generation_tokens_total") == value("request_generation_tokens_sum") == 13
    assert value("request_max_num_generation_tokens_sum") == 7
    assert value("request_params_max_tokens_sum") == 13
    for name in ("time_to_first_token_seconds", "request_generation_tokens", "request_queue_time_seconds"):
        assert value(f"{name}_count") == 3
    for name in ("request_prefill_time_seconds", "request_decode_time_seconds", "inference_compute_infer_duration"):
        assert value(f"{name}_count") == 3 and value(f"{name}_sum") > 0
    assert value("inter_token_latency_seconds_count") == 10
    assert value("time_per_output_token_seconds_count") == 2  # one token has no time per token after the first
    assert value("time_per_output_token_seconds_sum") > 0
    assert value("prefix_cache_queries_total") == 3 * usage["prompt_tokens"]
    assert value("gpu_prefix_cache_queries_total") == value("prefix_cache_queries_total")
    assert value("kv_cache_usage_perc") == value("num_requests_waiting") == 0


def test_ten_requests_of_ten_tokens_are_counted_exactly(http, change):
    for _ in range(10):
        body = {"prompt": "Ten of ten.", "temperature": 0, "max_tokens": 10, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
    grown = change()
    assert grown["vllm:request_total"] == grown["vllm:request_process_success_total"] == 10
    assert grown["vllm:generation_tokens_total"] == grown["vllm:request_generation_tokens_sum"] == 100
    assert grown["vllm:inter_token_latency_seconds_count"] == 90
    assert grown["vllm:request_success_total{finished_reason=length}"] == 10


def test_latencies_are_consistent_with_each_other(http, change):
    body = {"prompt": "How long does it take?", "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    began = time.monotonic()
    assert http.post("/v1/completions", json=body).status_code == 200
    took = time.monotonic() - began
    grown = change()
    total = grown["vllm:e2e_request_latency_seconds_sum"]
    first = grown["vllm:time_to_first_token_seconds_sum"]
    between = grown["vllm:inter_token_latency_seconds_sum"]
    assert 0 < first < total <= took
    assert first + between <= total
    per_token = grown["vllm:time_per_output_token_seconds_sum"]
    assert per_token * 19 == pytest.approx(between, rel=1e-3)
    inference = grown["vllm:inference_compute_infer_duration_sum"]
    parts = grown["vllm:request_prefill_time_seconds_sum"] + grown["vllm:request_decode_time_seconds_sum"]
    assert inference == pytest.approx(parts) and inference < total


def test_refused_requests_are_counted(http, change):
    for body in ({"prompt": []}, {"prompt": "a", "model": "other"}, {"prompt": "a", "n": 129}):
        assert http.post("/v1/completions", json=body).status_code >= 400
    assert http.post("/v1/chat/completions", content=b"{").status_code == 400
    grown = change()
    assert grown["vllm:request_total"] == grown["vllm:request_process_fail_total"] == 4
    assert grown["vllm:request_success_total{finished_reason=error}"] == 4
    assert grown["vllm:request_process_success_total"] == 0 and grown["vllm:prompt_tokens_total"] == 0


def test_names_sent_by_clients_create_no_new_series(http, metrics_of, server):
    before = set(metrics_of(server.url))
    for i in range(30):
        http.post("/v1/completions", json={"prompt": "a", "model": f"m{i}"})
        http.get(f"/path{i}")
    assert set(metrics_of(server.url)) == before


def test_tokens_of_steps_are_counted_as_in_vllm(http, change):
    body = {"prompt": [40, 50, 60, 70], "temperature": 0, "max_tokens": 5, "ignore_eos": True}
    for _ in range(3):
        http.post("/v1/completions", json=body)
    grown = change()
    assert grown["vllm:iteration_tokens_total_sum"] == 3 * (4 + 5)
    assert grown["vllm:iteration_tokens_total_count"] == 3 * 5


def test_draft_tokens_are_counted_as_by_old_and_new_versions_of_vllm():
    metrics = Metrics("model", 100, {"block_size": "16"})
    metrics.step(EngineStats(drafts=DraftCounts(2, 8, 3, [2, 1, 0, 0])))
    metrics.step(EngineStats(drafts=DraftCounts(4, 12, 6, [3, 2, 1, 0])))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(
            f"vllm:spec_decode_{name}", {"model_name": "model", "engine": "0", **labels}
        )

    assert [value(f"num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")] == [4, 12, 6]
    by_position = [value("num_accepted_tokens_per_pos_total", position=str(at)) for at in range(4)]
    assert by_position == [3, 2, 1, 0]
    assert value("num_emitted_tokens_total") == 10, "an accepted token, or one after the accepted ones"
    assert value("draft_acceptance_rate") == 0.5 and value("efficiency") == 10 / 16


def test_answers_are_counted_by_route_method_and_status(http, change):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for stream in (False, True):
        assert http.post("/v1/chat/completions", json=chat | {"stream": stream}).status_code == 200
    assert http.post("/v1/chat/completions", json={}).status_code == 400
    assert http.post("/v1/chat/completions/", content=b"{").status_code == 400
    assert http.get("/v1/chat/completions").status_code == 405
    assert http.head("/v1/models").status_code == 200
    for path in ("/nowhere", "/v1/elsewhere"):
        assert http.get(path).status_code == 404
    assert http.request("BREW", "/v1/models").status_code == 405
    http.get("/health")
    grown = {name: value for name, value in change().items() if name.startswith("http_requests_total") and value}
    assert grown == {
        "http_requests_total{handler=/v1/chat/completions,method=POST,status=2xx}": 2,
        "http_requests_total{handler=/v1/chat/completions,method=POST,status=4xx}": 2,
        "http_requests_total{handler=/v1/chat/completions,method=GET,status=4xx}": 1,
        "http_requests_total{handler=/v1/models,method=HEAD,status=2xx}": 1,
        "http_requests_total{handler=none,method=GET,status=4xx}": 2,
        "http_requests_total{handler=/v1/models,method=other,status=4xx}": 1,
    }
