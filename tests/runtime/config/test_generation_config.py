"""Values of generation_config.json that no request could have: refused at the start, naming file and key."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import AiakqError
from aiakq.runtime.config.hf_config import GenerationConfig

RAW = {"eos_token_id": 2}


def read(folder: Path, values: dict[str, Any], raw: dict[str, Any] = RAW, **given: Any) -> GenerationConfig:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return GenerationConfig.from_args(folder, EngineArguments(**given), raw, vocab_size=100)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_p", 0),
        ("top_p", 1.5),
        ("temperature", "hot"),
        ("temperature", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("min_p", [0.1]),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", 0),
        ("max_new_tokens", "20"),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, "3"]),
        ("eos_token_id", 2.5),
        ("top_k", "50"),
        ("eos_token_id", True),
        ("eos_token_id", {"id": 2}),
    ],
)
def test_a_value_that_no_request_could_have_is_refused(tmp_path, key, value):
    with pytest.raises(AiakqError, match=re.escape(f"generation_config.json sets {key} to {value!r}")) as caught:
        read(tmp_path, {key: value})
    assert caught.value.id == "generation_config" and "--override-generation-config" in caught.value.remedy
    with pytest.raises(AiakqError, match=f"--override-generation-config is .{key}: ") as caught:
        read(tmp_path, {}, override_generation_config={key: value})
    assert caught.value.id == "bad_option"
    good = {"eos_token_id": 3, "max_new_tokens": 5, "top_k": 5}.get(key, 0.5)
    read(tmp_path, {key: value}, override_generation_config={key: good})
    if key != "eos_token_id":
        assert read(tmp_path, {key: value}, generation_config="vllm").sampling == {}


def test_a_malformed_end_token_of_the_model_is_named(tmp_path):
    with pytest.raises(AiakqError, match="config.json sets eos_token_id to 'end'"):
        read(tmp_path, {}, {"eos_token_id": "end"})


@pytest.mark.parametrize(
    ("values", "raw", "expected"),
    [
        ({"eos_token_id": [7, 99999, 7]}, RAW, (7,)),
        ({"eos_token_id": 100}, RAW, (2,)),
        ({"eos_token_id": -1}, {"eos_token_id": [2, 3, 100]}, (2, 3)),
        ({"eos_token_id": [100]}, {}, ()),
    ],
)
def test_end_tokens_beyond_the_vocabulary_are_left_out_with_a_warning(tmp_path, caplog, values, raw, expected):
    with caplog.at_level(logging.WARNING, "aiakq.runtime"):
        assert read(tmp_path, values, raw).eos_token_ids == expected
    assert "is left out: the model's vocabulary has the ids 0 to 99" in caplog.text


def test_whole_numbers_of_json_are_integers(tmp_path):
    found = read(tmp_path, {"eos_token_id": [2.0, 3], "top_k": 50.0, "max_new_tokens": 1e2})
    assert found.eos_token_ids == (2, 3) and found.sampling == {"top_k": 50} and found.max_new_tokens == 100
    assert all(type(each) is int for each in (*found.eos_token_ids, found.sampling["top_k"], found.max_new_tokens))
    assert read(tmp_path, {}, {"eos_token_id": 2.0}).eos_token_ids == (2,)
    assert read(tmp_path, {}, override_generation_config={"top_k": 7.0}).sampling == {"top_k": 7}


def test_values_in_range_raise_no_warning(tmp_path, caplog):
    values = {"temperature": 0.0, "top_p": 1, "top_k": -1, "min_p": 0, "eos_token_id": [1, 2], "do_sample": False}
    found = read(tmp_path, values)
    assert found.sampling == {"temperature": 0.0, "top_p": 1, "top_k": -1, "min_p": 0}
    assert found.eos_token_ids == (1, 2) and not caplog.text
