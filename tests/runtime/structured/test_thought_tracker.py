"""ThoughtTracker: where a thought begins and ends in what tokens spell, and when its end has to come."""

from __future__ import annotations

import pytest

from aiakq.runtime.protocol.thought_budget import ThoughtBudget
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.thought_tracker import SpelledBudget, ThoughtTracker

TOKENS = [
    *(b"<think>", b"</think>", b"<|mark|>", b"a", b" ", b"\n", b"<th", b"ink>", b"</th", b"ink>b"),
    *("é".encode()[:1], "é".encode()[1:], b"<think>a", b"a</think>b", b"Stop.", b"</think>\n", b"<|call|>"),
]
SPECIAL = (2, 16)


def tracker(max_tokens: int, *, end=(b"</think>",), is_open=False, anywhere=False, repeats=False, starts=("<think>",)):
    end_ids = [TOKENS.index(text) for text in end]
    budget = ThoughtBudget(max_tokens, list(starts), ["</think>"], end_ids, is_open, anywhere, repeats)
    return ThoughtTracker(SpelledBudget(budget, Vocabulary(TOKENS, list(SPECIAL), added_ids=[0, 1])))


def written(tracker: ThoughtTracker, *wanted: bytes) -> list[bytes]:
    """What comes out if the model writes ``wanted``, and what is forced replaces nothing of it."""
    texts, rest = [], list(wanted)
    while rest or tracker.forced is not None:
        token = tracker.forced if tracker.forced is not None else TOKENS.index(rest.pop(0))
        ahead = tracker.copy()
        ahead.add(TOKENS.index(b"a"))  # a draft, which changes nothing here
        tracker.add(token)
        texts.append(TOKENS[token])
    return texts


@pytest.mark.parametrize("start", [[b"<think>"], [b"\n", b"<th", b"ink>"], [b" ", b"\n", b"<think>"]], ids=str)
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_a_thought_ends_after_its_tokens_from_the_start_mark(start, max_tokens):
    found = written(tracker(max_tokens), *start, *[b"a"] * 5)
    assert found == [*start, *[b"a"] * max_tokens, b"</think>", *[b"a"] * (5 - max_tokens)]


def test_a_token_of_mark_and_text_counts_as_one_of_the_thought():
    assert written(tracker(1), b"<think>a", b"a")[:2] == [b"<think>a", b"</think>"]
    assert written(tracker(0), b"<think>a", b"a")[:2] == [b"<think>a", b"</think>"]
    assert written(tracker(2), b"<think>a", b"a</think>b", b"a", b"a") == [b"<think>a", b"a</think>b", b"a", b"a"]


@pytest.mark.parametrize("end", [[b"</think>"], [b"</th", b"ink>"], [b"</th", b"ink>b"], [b"</think>\n"]], ids=str)
def test_a_thought_that_the_model_ends_is_not_ended_again(end):
    text = [b"<think>", b"a", *end, *[b"a"] * 9]
    assert written(tracker(4), *text) == text


def test_a_thought_of_the_prompt_counts_from_the_first_token():
    assert written(tracker(2, is_open=True), *[b"a"] * 4) == [b"a", b"a", b"</think>", b"a", b"a"]
    assert written(tracker(0, is_open=True), b"a") == [b"</think>", b"a"]


def test_a_start_mark_after_that_of_the_prompt_is_no_part_of_the_thought():
    assert written(tracker(2, is_open=True), b"\n", b"<think>", *[b"a"] * 3)[2:] == [b"a", b"a", b"</think>", b"a"]
    assert written(tracker(2, is_open=True), b"a", b"<think>", b"a") == [b"a", b"<think>", b"</think>", b"a"]


def test_a_thought_does_not_end_within_a_character():
    half, rest = "é".encode()[:1], "é".encode()[1:]
    assert written(tracker(1), b"<think>", half, rest, b"a") == [b"<think>", half, rest, b"</think>", b"a"]


def test_a_special_token_is_no_text():
    assert written(tracker(9), b"<th", b"<|mark|>", b"ink>", *[b"a"] * 20).count(b"</think>") == 0
    found = written(tracker(1), b"<think>", "é".encode()[:1], b"<|mark|>")
    assert found == [b"<think>", "é".encode()[:1], b"<|mark|>", b"</think>"]


def test_words_may_come_before_the_end_mark_and_blanks_after_it():
    end = [b"Stop.", b"\n", b"</think>", b"\n"]
    found = written(tracker(1, end=end), b"<think>", b"a", b"a")
    assert found == [b"<think>", b"a", *end, b"a"]


def test_an_end_that_has_begun_is_completed():
    end = (b"</th", b"ink>")
    assert written(tracker(2, end=end), b"<think>", b"a", b"</th") == [b"<think>", b"a", *end]
    end = (b"a", b"a", b"</think>")
    assert written(tracker(1, end=end), b"<think>", b"a") == [b"<think>", *end]


def test_a_later_mark_begins_a_thought_if_it_is_one_token():
    text = [b"<think>", b"a", b"a", b"a", b"<th", b"ink>", b"a", b"a", b"<think>", b"a", b"a"]
    once = [b"<think>", b"a", b"</think>", *text[2:]]
    assert written(tracker(1), *text) == once
    assert written(tracker(1, repeats=True), *text) == [*once[:-1], b"</think>", b"a"]


def test_a_mark_in_the_answer_begins_no_thought():
    text = [b"a", b"<th", b"ink>", *[b"a"] * 5]
    assert written(tracker(1), *text) == text
    assert written(tracker(1, repeats=True), *text) == text


def test_a_thought_may_begin_anywhere_in_a_text():
    found = written(tracker(1, anywhere=True), b"a", b"<th", b"ink>b", b"a", b"a</think>b", b"<think>", b"a", b"a")
    assert found == [b"a", b"<th", b"ink>b", b"</think>", b"a", b"a</think>b", b"<think>", b"a", b"</think>", b"a"]


def test_a_copy_goes_its_own_way():
    first = tracker(2)
    first.add(0)
    ahead = first.copy()
    ahead.add(3)
    ahead.add(3)
    assert ahead.forced == 1 and first.forced is None
    first.add(1)
    assert first.is_done and not ahead.is_done
