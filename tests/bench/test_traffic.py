"""Workloads with shared prefixes, conversations, traces and ShareGPT: which requests they send, and when."""

from __future__ import annotations

import json
import random

import pytest

from aiakq.arguments.bench import WorkloadArguments
from aiakq.bench import load, serve, workload
from aiakq.bench.serve import ServeOptions
from aiakq.bench.workload import WorkloadRequest
from aiakq.errors import AiakqError

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 3500, "input_length": 600, "output_length": 7, "hash_ids": [1, 9]},
]
BURSTGPT = """Timestamp,Model,WorkloadRequest tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,12,3,15,Conversation log
6,ChatGPT,20,0,20,Conversation log
9,GPT-4,30,4,34,API log
"""


def requests_of(vocab_size: int | None = 1000, **options) -> list[WorkloadRequest]:
    return workload.open_workload(WorkloadArguments(**options), random.Random(0)).requests(vocab_size)


def lines(path, entries: list[dict]):
    path.write_text("\n".join(map(json.dumps, entries)) + "\n")
    return path


def test_prompts_share_their_prefixes_in_turn():
    found = requests_of(workload="prefix", num_prompts=6, prefix_len=20, num_prefixes=2, input_len=5, output_len=3)
    assert {len(request.prompt) for request in found} == {25}
    assert found[0].prompt[:20] == found[2].prompt[:20] != found[1].prompt[:20]
    assert len({tuple(request.prompt) for request in found}) == 6


def test_turns_of_a_conversation_extend_the_one_before():
    found = requests_of(workload="conversation", num_prompts=6, turns=3, input_len=4, output_len=2)
    assert [request.follows for request in found] == [None, None, 0, 1, 2, 3]
    assert found[4].prompt[:10] == found[2].prompt and found[2].prompt[:4] == found[0].prompt
    assert [len(request.prompt) for request in found] == [4, 4, 10, 10, 16, 16]


def test_a_mooncake_trace_has_times_lengths_and_shared_blocks(tmp_path):
    path = lines(tmp_path / "trace.jsonl", MOONCAKE)
    found = requests_of(workload="trace", dataset=path, trace_speed=2.0)
    assert [(request.at, len(request.prompt), request.output_len) for request in found] == [
        (0, 1100, 5),
        (1.25, 600, 7),
    ]
    assert found[0].prompt[:512] == found[1].prompt[:512] and found[0].prompt[512:600] != found[1].prompt[512:]
    assert len(requests_of(workload="trace", dataset=path, num_prompts=1)) == 1


def test_a_burstgpt_trace_leaves_failed_requests_out(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(BURSTGPT)
    found = requests_of(workload="trace", dataset=path)
    assert [(request.at, len(request.prompt), request.output_len) for request in found] == [(0, 12, 3), (4, 30, 4)]


def test_a_trace_of_our_own_holds_prompts(tmp_path):
    path = lines(
        tmp_path / "trace.jsonl",
        [{"at": 0.5, "prompt": "b", "output_length": 2}, {"at": 0.1, "prompt": "a"} | {"output_length": 3}],
    )
    found = requests_of(None, workload="trace", dataset=path)
    assert [(request.prompt, request.at) for request in found] == [("a", 0.0), ("b", pytest.approx(0.4))]


def test_sharegpt_gives_first_questions_and_lengths_of_answers(tmp_path):
    path = tmp_path / "sharegpt.json"
    talk = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "one two three four five six"}]
    path.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}, {"id": "x"}]))
    (found,) = requests_of(None, workload="sharegpt", dataset=path)
    assert (found.prompt, found.output_len) == ("Why?", 8)


@pytest.mark.parametrize(
    ("name", "file", "content", "id"),
    [
        ("trace", None, "", "usage"),
        ("sharegpt", None, "", "usage"),
        ("trace", "a.jsonl", "", "usage"),
        ("trace", "a.jsonl", '{"timestamp": 1}', "model_malformed"),
        ("trace", "a.jsonl", '{"at": 1, "input_length": "x", "output_length": 1}', "model_malformed"),
        ("trace", "a.csv", "Timestamp\n1\n", "model_malformed"),
        ("sharegpt", "a.json", "[]", "usage"),
        ("sharegpt", "a.json", "[1]", "model_malformed"),
        ("sharegpt", "a.json", "{", "model_malformed"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, file, content, id):
    path = None if file is None else tmp_path / file
    if path is not None:
        path.write_text(content)
    with pytest.raises(AiakqError) as caught:
        requests_of(workload=name, dataset=path)
    assert caught.value.id == id


# --- against a server --------------------------------------------------------------------------------------------


def run(url: str, **options) -> dict:
    settings = {"num_prompts": 6, "input_len": 20, "output_len": 6, "save_detailed": True, **options}
    return serve.run(ServeOptions(base_url=url, **settings), lambda *news: None).document()


def test_shared_prefixes_hit_the_cache(bench_server, monkeypatch):
    monkeypatch.setattr(load, "MAX_LAG", 60.0)  # a busy machine is another warning
    document = run(bench_server.url, workload="prefix", prefix_len=64, max_concurrency=1, num_warmups=0)
    assert document["completed"] == 6 and document["prefix_cache"]["hits"] == 5 * 64
    assert document["warnings"] == []


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_conversations_wait_for_their_answers(bench_server, endpoint):
    document = run(bench_server.url, workload="conversation", turns=3, endpoint=endpoint)
    detailed = document["detailed"]
    ends = [start + latency for start, latency in zip(detailed["start_times"], detailed["latencies"], strict=True)]
    assert document["completed"] == 6
    assert all(detailed["start_times"][index] >= ends[index - 2] for index in range(2, 6))
    lengths = detailed["input_lens"]
    assert lengths[0] < lengths[2] < lengths[4] and document["prefix_cache"]["hits"] > 0


def test_a_trace_is_sent_at_its_times(bench_server, tmp_path):
    path = lines(tmp_path / "trace.jsonl", [{"at": at, "input_length": 9, "output_length": 3} for at in (0, 0.3, 0.4)])
    document = run(bench_server.url, workload="trace", dataset=path, num_prompts=None)
    detailed = document["detailed"]
    due = [start - wait for start, wait in zip(detailed["start_times"], detailed["queue_times"], strict=True)]
    assert [moment - due[0] for moment in due] == pytest.approx([0, 0.3, 0.4])
    assert document["total_output_tokens"] == 9 and document["scheduled_e2el_ms"]["mean"] is not None


def test_a_trace_has_no_other_end(bench_server, tmp_path):
    path = lines(tmp_path / "trace.jsonl", [{"at": 0, "input_length": 9, "output_length": 3}])
    with pytest.raises(AiakqError, match="a fixed number of requests"):
        run(bench_server.url, workload="trace", dataset=path, num_prompts=None, duration_s=1.0, request_rate=5.0)
