"""``bench serve`` against a real server: what it counts, times, warns of and refuses."""

from __future__ import annotations

import json
import socket
import types

import pytest

from aiakq.bench import load, serve
from aiakq.bench.client import Endpoint, Timing
from aiakq.bench.load import ClientLoad
from aiakq.bench.serve import ServeOptions
from aiakq.cli import main
from aiakq.errors import AiakqError


def run(url: str, **options) -> tuple[dict, list[tuple[int, int, int]]]:
    """Run the benchmark; return its document and the reported progress."""
    progress: list[tuple[int, int, int]] = []
    options = {"num_prompts": 6, "input_len": 40, "output_len": 8, **options}
    record = serve.run(ServeOptions(base_url=url, **options), lambda *news: progress.append(news))
    return record.document(), progress


def test_every_request_is_counted_and_timed(bench_server):
    document, progress = run(bench_server.url, goodput={"e2el": 60_000.0}, save_detailed=True)
    assert (document["completed"], document["failed"]) == (6, 0)
    assert document["total_input_tokens"] == 6 * 40
    assert document["total_output_tokens"] == 6 * 8
    assert document["request_throughput"] == pytest.approx(6 / document["duration"])
    assert document["request_goodput"] == document["request_throughput"]
    assert document["output_throughput"] == pytest.approx(48 / document["duration"])
    assert 1 <= document["max_concurrent_requests"] <= 6
    assert document["max_output_tokens_per_s"] == pytest.approx(48)
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < document[f"{name}_ms"]["p50"] <= document[f"{name}_ms"]["p99"]
        assert document[f"mean_{name}_ms"] == document[f"{name}_ms"]["mean"]
    assert document["ttft_ms"]["mean"] < document["e2el_ms"]["mean"]
    assert progress[0] == (0, 6, 0) and progress[-1] == (6, 6, 0)
    detailed = document["detailed"]
    assert detailed["output_lens"] == [8] * 6 and detailed["errors"] == [""] * 6
    # TPOT is defined over the whole answer, ITL over its gaps: they agree in the mean.
    spans = [latency - ttft for latency, ttft in zip(detailed["latencies"], detailed["ttfts"], strict=True)]
    assert document["tpot_ms"]["mean"] == pytest.approx(1000 * sum(spans) / 6 / 7)


def test_a_new_seed_each_run_and_no_cache_hits(bench_server):
    first, _ = run(bench_server.url)
    second, _ = run(bench_server.url)
    assert first["seed"] != second["seed"]
    assert second["prefix_cache"] == {"queries": 240, "hits": 0, "hit_rate": 0}
    assert not any("prefix cache" in text for text in second["warnings"])


def test_a_repeated_seed_is_caught_as_measuring_the_cache(bench_server):
    run(bench_server.url, seed=99)
    document, _ = run(bench_server.url, seed=99)
    assert document["prefix_cache"]["hit_rate"] > 0.5
    assert any("prefix cache" in text for text in document["warnings"])


def test_rate_and_concurrency_are_kept(bench_server):
    document, _ = run(bench_server.url, request_rate=20.0, burstiness=100.0, max_concurrency=1)
    assert document["max_concurrent_requests"] == 1
    assert document["duration"] >= 6 / 20 * 0.9
    assert document["config"]["request_rate"] == 20.0


def test_answers_of_one_token_have_no_tpot(bench_server):
    document, _ = run(bench_server.url, output_len=1)
    assert document["completed"] == 6
    assert document["tpot_ms"]["mean"] is None and document["itl_ms"]["mean"] is None
    assert document["ttft_ms"]["mean"] == document["e2el_ms"]["mean"]


def test_failed_requests_are_counted_with_their_reason(bench_server, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Once upon a time"}\n{"prompt": [1, 2, 3], "max_tokens": 1000000}\n')
    document, _ = run(bench_server.url, dataset=path, num_prompts=None, num_warmups=0)
    assert (document["completed"], document["failed"]) == (1, 1)
    assert document["first_error"].startswith("HTTP 400: ")


def test_a_dataset_smaller_than_the_run_is_marked(bench_server, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("Once upon a time\n")
    document, _ = run(bench_server.url, dataset=path, num_prompts=3)
    assert document["completed"] == 3
    assert any("fewer prompts" in text for text in document["warnings"])
    assert document["config"]["ignore_eos"] is False


def test_a_warm_up_that_fails_ends_the_run(bench_server):
    with pytest.raises(AiakqError) as caught:
        run(bench_server.url, output_len=100_000)
    assert caught.value.id == "bench_failed"


def test_an_unknown_model_names_what_is_served(bench_server):
    with pytest.raises(AiakqError) as caught:
        run(bench_server.url, model="other")
    assert caught.value.id == "unknown_model" and "tinybooks" in str(caught.value)


def test_no_server_is_an_error_with_the_url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(AiakqError) as caught:
        run(f"http://127.0.0.1:{port}")
    assert caught.value.id == "server_unreachable" and str(port) in str(caught.value)


def test_keys_that_scripts_of_vllm_group_by(bench_server):
    document, _ = run(bench_server.url, request_rate=50.0)
    assert (document["backend"], document["model_id"], document["num_prompts"]) == ("openai", "tinybooks", 6)
    assert (document["request_rate"], document["burstiness"], document["max_concurrency"]) == (50.0, 1.0, None)
    assert run(bench_server.url)[0]["request_rate"] == "inf"


def test_latency_from_the_scheduled_time_holds_the_wait_for_a_slot(bench_server):
    document, _ = run(bench_server.url, request_rate=500.0, max_concurrency=1, output_len=20)
    assert document["queue_ms"]["max"] > 0
    scheduled, sent = document["scheduled_e2el_ms"], document["e2el_ms"]
    assert scheduled["mean"] == pytest.approx(sent["mean"] + document["queue_ms"]["mean"])
    # In a closed loop nothing is scheduled.
    assert run(bench_server.url, max_concurrency=1)[0]["scheduled_e2el_ms"]["mean"] is None


def test_a_duration_in_place_of_a_number(bench_server):
    document, _ = run(bench_server.url, num_prompts=None, request_rate=40.0, burstiness=float("inf"), duration_s=0.5)
    assert document["completed"] == 20 and document["duration"] >= 0.5


def test_a_duration_with_a_number_kept_in_flight(bench_server):
    document, progress = run(bench_server.url, num_prompts=None, max_concurrency=3, duration_s=0.5)
    assert document["completed"] >= 3 and document["max_concurrent_requests"] == 3
    assert document["duration"] >= 0.5 and document["prefix_cache"]["hits"] == 0
    assert progress[-1] == (document["completed"], 0, 0)


def test_the_begin_and_the_end_of_the_load_are_not_measured(bench_server):
    cut = {"request_rate": 40.0, "burstiness": float("inf"), "duration_s": 1.0}
    document, _ = run(bench_server.url, num_prompts=None, warmup_s=0.25, cooldown_s=0.25, **cut)
    assert document["completed"] == pytest.approx(20, abs=1) and document["duration"] == pytest.approx(0.5)
    assert document["request_throughput"] == pytest.approx(40, abs=2)
    assert document["output_throughput"] == pytest.approx(document["total_output_tokens"] / 0.5)


def test_a_ramp_ends_faster_than_it_begins(bench_server):
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 10.0, "ramp_up_end_rps": 50.0}
    document, _ = run(bench_server.url, num_prompts=12, burstiness=float("inf"), save_detailed=True, **ramp)
    detailed = document["detailed"]
    due = [start - wait for start, wait in zip(detailed["start_times"], detailed["queue_times"], strict=True)]
    assert due[1] - due[0] > 2 * (due[-1] - due[-2])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"duration_s": 1.0}, "both set the end of the load"),
        ({"duration_s": 1.0, "num_prompts": None}, "would send requests without end"),
        ({"duration_s": 1.0, "num_prompts": None, "request_rate": 9.0, "warmup_s": 1.0}, "leave nothing to measure"),
        ({"ramp_up_strategy": "linear"}, "A ramp needs"),
    ],
)
def test_loads_that_make_no_sense_are_refused_before_anything_is_sent(options, text):
    with pytest.raises(AiakqError, match=text):
        run("http://127.0.0.1:9", **options)


def test_chat_is_sent_prompts_of_about_the_length(bench_server):
    document, _ = run(bench_server.url, endpoint="/v1/chat/completions", save_detailed=True)
    assert (document["completed"], document["total_output_tokens"]) == (6, 6 * 8)
    assert all(30 <= length <= 60 for length in document["detailed"]["input_lens"])
    assert document["backend"] == "openai-chat" and document["ttft_ms"]["p50"] < document["e2el_ms"]["p50"]


def test_further_fields_of_the_body_are_sent(bench_server):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    settings = {"extra_body": {"response_format": form}, "ignore_eos": False, "output_len": 40, "save_detailed": True}
    document, _ = run(bench_server.url, endpoint="/v1/chat/completions", num_prompts=2, **settings)
    assert all(text.startswith("{") for text in document["detailed"]["generated_texts"])
    refused, _ = run(bench_server.url, extra_body={"temperature": -1}, num_warmups=0)
    assert refused["failed"] == 6 and "temperature" in refused["first_error"]


def test_without_usage_tokens_are_counted_here(bench_server):
    no_usage = {"extra_body": {"stream_options": {"include_usage": False}}}
    document, _ = run(bench_server.url, **no_usage)
    assert document["tokens_from"] == "tokenizer" and document["output_throughput"] > 0
    assert any("no usage" in text for text in document["warnings"])
    assert run(bench_server.url)[0]["tokens_from"] == "usage"


# --- the command ---------------------------------------------------------------------------------------------------


def command(url: str, *words: str) -> list[str]:
    return ["bench", "serve", "--base-url", url, "--num-prompts", "3", "--output-len", "4", "--input-len", "20", *words]


def test_command_writes_one_document_and_the_same_file(bench_server, tmp_path, capsys):
    path = tmp_path / "result.json"
    assert main(command(bench_server.url, "--output", str(path), "--fail-if", "tpot_ms.p50>60000,failed>0")) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(path.read_text())
    assert "time to first token" in err and "gate passed" in err
    assert "{" not in err


def test_command_with_a_gate_that_fails_ends_with_10(bench_server, capsys):
    assert main(command(bench_server.url, "--fail-if", "completed<1000")) == 10
    out, err = capsys.readouterr()
    assert json.loads(out)["completed"] == 3
    assert "aiakq: error[gate_failed]: 1 of 1 gates failed: completed<1000 (measured 3)." in err


def test_command_checks_gates_before_it_sends_anything(capsys):
    assert main(command("http://127.0.0.1:9", "--fail-if", "tpt_ms.p50>1")) == 2
    assert "tpot_ms.p50" in capsys.readouterr().err


def test_command_with_failed_requests_ends_with_9(bench_server, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Once"}\n{"prompt": [1], "max_tokens": 1000000}\n')
    words = ["bench", "serve", "--base-url", bench_server.url, "--dataset", str(path), "--num-warmups", "0"]
    assert main([*words, "--output-len", "4"]) == 9
    out, err = capsys.readouterr()
    assert json.loads(out)["failed"] == 1
    assert "aiakq: error[bench_failed]: 1 of 2 requests failed" in err


def test_the_document_has_the_verdicts_of_the_gates(bench_server, capsys):
    words = ["bench", "serve", "--base-url", bench_server.url, "--num-prompts", "2", "--input-len", "8"]
    assert main([*words, "--output-len", "2", "--fail-if", "completed<2,ttft_ms.p50>0"]) == 10
    first, second = json.loads(capsys.readouterr().out)["gates"]
    assert (first["gate"], first["value"], first["failed"]) == ("completed<2", 2, False)
    assert (second["key"], second["operator"], second["limit"], second["failed"]) == ("ttft_ms.p50", ">", 0.0, True)


@pytest.mark.parametrize(
    ("gate", "words", "text"),
    [
        ("goodput_share<99%", (), "no limits are given"),
        ("goodput_shares.tpot<99%", ("--goodput", "ttft:5"), "no limit is given"),
        ("scheduled_e2el_ms.p99>5", (), "no scheduled times"),
        ("mean_tpot_ms>5", ("--output-len", "1"), "responses have one token"),
        ("ttft_ms.p50>+5%", (), "needs --baseline"),
    ],
)
def test_a_gate_that_cannot_be_measured_is_refused_before_anything_is_sent(gate, words, text, capsys):
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *words, "--fail-if", gate]) == 2
    assert text in capsys.readouterr().err


def test_strict_fails_a_run_that_measured_its_cache(bench_server, capsys, monkeypatch):
    monkeypatch.setattr(load, "MAX_LAG", 60.0)  # a busy machine is another warning
    words = ["bench", "serve", "--base-url", bench_server.url, "--num-prompts", "2", "--input-len", "64"]
    words += ["--output-len", "2", "--seed", "4711", "--strict"]
    assert main(words) == 0
    assert main(words) == 10
    assert "error[result_has_warnings]" in capsys.readouterr().err


def test_repeats_give_intervals(bench_server, capsys, tmp_path):
    words = ["bench", "serve", "--base-url", bench_server.url, "--num-prompts", "3", "--input-len", "16"]
    words += ["--output-len", "3", "--repeats", "3", "--seed", "90210", "--fail-if", "intervals.ttft_ms.p50.high<0"]
    assert main([*words, "--output", str(tmp_path / "r.json")]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert [run["seed"] for run in document["runs"]] == [90210, 90211, 90212]
    assert document["completed"] == 9 and document["prefix_cache"]["hits"] == 0
    values = [run["ttft_ms"]["p50"] for run in document["runs"]]
    assert document["ttft_ms"]["p50"] == pytest.approx(sum(values) / 3)
    bounds = document["intervals"]["ttft_ms"]["p50"]
    assert bounds["low"] < document["ttft_ms"]["p50"] < bounds["high"]
    assert "3 runs of 3 requests" in err and "95 % interval" in err
    assert main(["bench", "compare", str(tmp_path / "r.json"), str(tmp_path / "r.json"), "--margin", "100"]) in (0, 11)
    (row,) = (row for row in json.loads(capsys.readouterr().out)["metrics"] if row["metric"] == "ttft_ms.p50")
    assert (row["over"], row["measurements"]) == ("runs", [3, 3])


def test_errors_end_the_load(bench_server):
    document, _ = run(
        bench_server.url, num_prompts=50, num_warmups=0, max_concurrency=1, extra_body={"temperature": -1}, max_errors=3
    )
    assert (document["failed"], document["completed"], document["not_sent"]) == (3, 0, 47)
    assert document["stopped"] == "3 requests failed (--max-errors)"
    assert any("ended early" in text for text in document["warnings"])


def test_overload_is_looked_for_at_a_rate_only():
    with pytest.raises(AiakqError, match="cannot fall behind"):
        run("http://127.0.0.1:9", stop_on_overload=True)


def test_requests_go_to_the_adapters_in_turn(bench_server, monkeypatch):
    sent: list[str] = []
    body = Endpoint.body
    monkeypatch.setattr(Endpoint, "body", lambda self, request: sent.append(request.model) or body(self, request))
    document, _ = run(bench_server.url, adapters=("tinybooks", "tinybooks"), num_warmups=0)
    assert document["completed"] == 6 and sent == ["tinybooks"] * 6
    with pytest.raises(AiakqError) as caught:
        run(bench_server.url, adapters=("tinybooks", "other"))
    assert caught.value.id == "unknown_model"


def test_the_record_says_what_server_it_was_and_how_busy_the_machine(bench_server):
    where = run(bench_server.url)[0]["environment"]
    assert where["server"]["version"] and where["server"]["torch"]
    assert len(where["load_average"]) == 2 and where["memory_bytes"] > 1 << 28


# --- the arithmetic ------------------------------------------------------------------------------------------------


def timing(sent: float, arrivals: list[float], tokens: int) -> Timing:
    return Timing(sent, sent, arrivals[-1], arrivals, input_tokens=10, output_tokens=tokens, finish_reason="length")


def test_without_usage_and_tokenizer_chunks_are_counted_with_a_warning():
    uncounted = timing(0.0, [0.1, 0.2, 0.3], 0)
    assert serve._count_tokens([uncounted], None) == "chunks" and uncounted.output_tokens == 3
    assert "Give --tokenizer" in serve._token_warnings("chunks")[0]


def test_a_late_client_reports_it():
    assert ClientLoad([0.001] * 100).warnings() == [] == ClientLoad([]).warnings()
    (text,) = ClientLoad([0.001] * 90 + [0.2] * 10, 0.97).warnings()
    assert "lagged by 200 ms" in text and "97%" in text


def test_refusals_for_too_many_connections_come_with_a_remedy():
    text = "HTTP 503: There are too many connections: at most 256 are taken from one address."
    refused, served = (types.SimpleNamespace(error=error) for error in (text, None))
    [warning] = serve._connection_warnings([refused, served])
    assert "rejected 1 requests" in warning and "--max-connections-per-address" in warning
    assert serve._connection_warnings([served]) == []
