"""Defaults of sampling and ends of answers in new files: those that a server takes, or none, said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiakq.convert.gguf.vocabulary import vocabulary_keys
from aiakq.errors import AiakqError

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tinybooks"


@pytest.fixture
def keys_of(tmp_path):
    """Return the keys and notes for contents of generation_config.json and keys of config.json."""
    for path in EXAMPLE.iterdir():
        if "token" in path.name or path.name == "config.json":
            shutil.copy(path, tmp_path)

    def keys(generation: dict[str, Any] | None, **config: Any) -> tuple[dict[str, object], list[str]]:
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        raw = json.loads((tmp_path / "config.json").read_text()) | config
        checkpoint: Any = SimpleNamespace(path=tmp_path, config=raw, foreign=None, named_path=tmp_path)
        return vocabulary_keys(checkpoint, raw["vocab_size"])

    return keys


def test_no_limit_of_top_k_is_0_and_what_is_not_held_is_said(keys_of):
    keys, notes = keys_of({"top_k": -1, "temperature": 1, "max_new_tokens": 5, "no_repeat_ngram_size": 3})
    assert keys["general.sampling.top_k"] == 0 and keys["general.sampling.temp"] == 1.0
    assert notes[-1] == "Defaults of requests that such files do not hold: max_new_tokens, no_repeat_ngram_size."


def test_old_checkpoints_have_their_values_in_the_config(keys_of):
    assert keys_of(None, temperature=0.5)[0]["general.sampling.temp"] == 0.5


@pytest.mark.parametrize("value", [None, []])
def test_ends_are_those_of_the_config_where_the_other_file_says_none(keys_of, value):
    keys, _ = keys_of({"eos_token_id": value, "top_k": 5}, eos_token_id=[0, 2, 7])
    assert {keys[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")} == {0, 2, 7}


@pytest.mark.parametrize(
    "change", [{"temperature": "0.3"}, {"temperature": -1}, {"top_k": 20.5}, {"eos_token_id": "x"}]
)
def test_values_that_no_server_takes_are_refused(keys_of, change):
    with pytest.raises(AiakqError) as refused:
        keys_of(change)
    assert refused.value.id == "generation_config"
