"""Prompts by name and by kind of text, as sentence-transformers chooses them."""

from __future__ import annotations

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.text_prompts import TextPrompts, role_of

NAMED = {"query": "Q: ", "passage": "P: ", "topics": "T: "}


@pytest.mark.parametrize(
    ("prompt_name", "input_type", "expected"),
    [
        (None, None, "T: "),
        ("query", None, "Q: "),
        (None, "query", "Q: "),
        (None, "search_query", "Q: "),
        (None, "document", "P: "),
        (None, "search_document", "P: "),
        (None, "topics", "T: "),
    ],
)
def test_a_name_a_kind_of_text_or_the_default_chooses(prompt_name, input_type, expected):
    assert TextPrompts(NAMED, "topics").before(prompt_name, input_type) == expected


def test_a_kind_without_a_prompt_has_none_beside_one_that_has():
    assert TextPrompts({"query": "Q: "}, "query").before(None, "document") == ""
    assert TextPrompts({"query": "Q: "}).before(None, None) == ""


@pytest.mark.parametrize(
    ("prompts", "prompt_name", "input_type", "param", "word"),
    [
        (TextPrompts(NAMED), "nothing", None, "prompt_name", "query, passage, topics"),
        (TextPrompts(NAMED), None, "nothing", "input_type", "query, passage, topics"),
        (TextPrompts({"topics": "T: "}), None, "query", "input_type", "for queries and documents; they name topics"),
        (TextPrompts(), None, "document", "input_type", "config_sentence_transformers.json"),
        (TextPrompts(NAMED), "query", "query", "input_type", "prompt_name"),
    ],
)
def test_what_the_files_do_not_name_is_refused(prompts, prompt_name, input_type, param, word):
    with pytest.raises(AiakqError, match=word) as caught:
        prompts.before(prompt_name, input_type)
    assert caught.value.id == "unsupported_parameter" and caught.value.param == param


def test_names_of_kinds():
    assert [role_of(name) for name in ("query", "passage", "clustering")] == ["query", "document", None]
