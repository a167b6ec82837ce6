"""Text with lone surrogates, in every field that accepts text."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.grammar import grammar_of
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.unicode_text import well_formed
from aiakq.runtime.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("plain", "plain"),
        ("é\U0001f389", "é\U0001f389"),
        ("a\ud83c", "a\ufffd"),
        ("\udf89a", "\ufffda"),
        ("\ud83c\udf89", "\U0001f389"),
        ("\ud83c\ud83c\udf89\udf89", "\ufffd\U0001f389\ufffd"),
        ("\udf89\ud83c", "\ufffd\ufffd"),
    ],
)
def test_pairs_are_joined_and_halves_replaced(text, expected):
    assert well_formed(text) == expected


def test_tokenizers_take_every_string(example_model: Path):
    tokenizer = Tokenizer.load(example_model)
    assert tokenizer.encode("a \ud83c") == tokenizer.encode("a \ufffd")
    assert tokenizer.encode_pair("\ud83c", "b") == tokenizer.encode_pair("\ufffd", "b")
    prompt = tokenizer.chat_prompt([{"role": "user", "content": "cut \ud83c"}], "{{ messages[0].content }}")
    assert prompt == "cut \ufffd"


def test_parameters_of_requests_take_every_string():
    params = SamplingParams(stop=["\ud83c"], bad_words=["a\ud83c"])
    assert params.stop_strings == ("\ufffd",) and params.bad_words == ["a\ufffd"]
    for kind, value in {
        "regex": "a\ud83c",
        "choice": ["a\ud83c"],
        "grammar": 'start: "a\ud83c"',
        "json": {"const": "a\ud83c"},
        "structural_tag": {"structures": [], "triggers": ["a\ud83c"]},
    }.items():
        grammar = grammar_of("structured_outputs", {kind: value})
        assert grammar is not None and "a\ufffd" in grammar.text
    assert "\ufffd" in grammar_of("structured_outputs", {"json": '{"const": "\\ud83c"}'}).text


@pytest.mark.parametrize("schema", [{"properties": {"a\ud83c": {}}}, '{"properties": {"a\\ud83c": {}}}'])
def test_keys_of_schemas_are_refused(schema):
    with pytest.raises(AiakqError, match="half of a character"):
        grammar_of("structured_outputs", {"json": schema})
