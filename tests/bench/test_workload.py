"""Workloads: exact lengths, the arrival process, datasets, and the cache trap."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from aiakq.arguments.bench import WorkloadArguments, parse_goodput
from aiakq.bench import workload
from aiakq.errors import AiakqError


def test_random_requests_have_exact_lengths_and_repeat_with_the_seed():
    def make(seed):
        return workload.random_requests(5, 17, 3, 100, random.Random(seed))

    assert all(len(request.prompt) == 17 and request.output_len == 3 for request in make(1))
    assert all(0 <= token < 100 for request in make(1) for token in request.prompt)
    assert make(1) == make(1)
    assert make(1) != make(2)


def test_new_seeds_differ():
    assert len({workload.new_seed() for _ in range(20)}) == 20


def test_dataset_lines_of_text_and_json(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        'plain words\n\n{"prompt": "from json", "max_tokens": 5}\n{"prompt": [1, 2, 3]}\n', encoding="utf-8"
    )
    requests, repeated = workload.dataset_requests(path, None, 9, random.Random(0))
    assert not repeated
    found = {(str(request.prompt), request.output_len) for request in requests}
    assert found == {("plain words", 9), ("from json", 5), ("[1, 2, 3]", 9)}
    again, repeated = workload.dataset_requests(path, 7, 9, random.Random(0))
    assert repeated and len(again) == 7


def test_a_line_of_json_goes_on_behind_other_separators_of_lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "one\u2028two\x85three"}\r\nplain\r\n'.encode())
    requests, _ = workload.dataset_requests(path, None, 9, random.Random(0))
    assert {request.prompt for request in requests} == {"one\u2028two\x85three", "plain"}


@pytest.mark.parametrize(
    ("content", "id"),
    [
        ("", "usage"),
        ("\n \n", "usage"),
        ('{"prompt": ', "model_malformed"),
        ('{"text": "x"}', "model_malformed"),
        ('{"prompt": ""}', "model_malformed"),
        ('{"prompt": ["x"]}', "model_malformed"),
        ('{"prompt": "x", "max_tokens": 0}', "model_malformed"),
        (None, "model_malformed"),
    ],
)
def test_a_dataset_that_cannot_be_used(tmp_path, content, id):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(AiakqError) as caught:
        workload.dataset_requests(path, None, 9, random.Random(0))
    assert caught.value.id == id and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "id"),
    [
        ({"workload": "nothing"}, "bad_option"),
        ({"workload": "dataset"}, "usage"),
        ({"workload": "random", "dataset": Path("prompts.txt")}, "option_conflict"),
        ({"dataset": Path("not-there.txt")}, "model_malformed"),
    ],
)
def test_a_workload_that_cannot_be_used(options, id):
    with pytest.raises(AiakqError) as caught:
        workload.open_workload(WorkloadArguments(**options), random.Random(0))
    assert caught.value.id == id


def test_random_prompts_need_the_size_of_the_vocabulary():
    source = workload.open_workload(WorkloadArguments(num_prompts=2, input_len=3), random.Random(0))
    assert [len(request.prompt) for request in source.requests(50)] == [3, 3]
    with pytest.raises(AiakqError, match="--vocab-size"):
        source.requests(None)


def test_a_random_run_that_hits_the_cache_is_marked():
    assert workload.hit_rate(0, 0) is None
    assert workload.hit_rate(None, None) is None
    assert workload.cache_warning(True, workload.hit_rate(1000, 10)) == []
    (text,) = workload.cache_warning(True, workload.hit_rate(1000, 11))
    assert "1.1%" in text
    assert workload.cache_warning(False, 0.9) == []


def test_vocabulary_of_plain_and_nested_configs():
    assert workload.vocab_size({"vocab_size": 12}) == 12
    assert workload.vocab_size({"text_config": {"vocab_size": 13}}) == 13
    assert workload.vocab_size({}) is None


def test_goodput_limits(aiakq):
    assert parse_goodput(["ttft:200 tpot:50", "e2el:1e3"]) == {"ttft": 200, "tpot": 50, "e2el": 1000}
    for text in ("ttft", "ttft:x", "ttft:-1", "ttft:inf", "speed:5"):
        ended = aiakq("bench", "serve", "--goodput", text)
        assert ended.code == 2 and f"--goodput is '{text}'" in ended.last
