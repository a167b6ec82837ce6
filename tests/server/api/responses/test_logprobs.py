"""The tokens of each piece of an answer are found, whatever comes between the pieces."""

from __future__ import annotations

from aiakq.server.api.output.events import CallEnded, CallStarted, ContentPiece, ReasoningPiece
from aiakq.server.api.responses.logprobs import TextLogprobs


def add(found: TextLogprobs, *tokens: str) -> None:
    start = len(found._text)
    for token in tokens:
        found.add(token, [start], [token])
        start += len(token)


def test_reasoning_and_calls_have_none():
    found = TextLogprobs()
    add(found, "<think>", "so", " it", "</think>", "\n", "An", "swer", ".", "<call>", "swer", "</call>", "swer")
    assert found.of(ReasoningPiece("so it")) == []
    assert found.of(ContentPiece("Answ")) == ["An", "swer"]
    assert found.of(ContentPiece("er.")) == ["."], "a token in two pieces belongs to the first"
    assert found.of(CallStarted(0, "a", "swer")) == found.of(CallEnded(0)) == []
    assert found.of(ContentPiece("swer")) == ["swer"] and found._cursor == len(found._text)


def test_a_token_that_begins_before_a_piece_belongs_to_it():
    found = TextLogprobs()
    add(found, "</think>\n\nA", "b")
    assert found.of(ContentPiece("Ab")) == ["</think>\n\nA", "b"]


def test_text_that_was_changed_has_none():
    found = TextLogprobs()
    add(found, "a", "<mark>", "b")
    assert found.of(ContentPiece("ab")) == []
