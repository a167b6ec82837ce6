"""Prompt lookup: what followed the same tokens the last time."""

from __future__ import annotations

import random

import pytest

from aiakq.runtime.config.speculation import SpeculationConfig
from aiakq.runtime.speculation.proposers import NgramTable, PromptLookup, proposer_of


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1]),
        ([1, 2, 5, 3, 2, 6, 1, 2], [5, 3, 2]),  # the longest n-gram first, though a shorter one was later
        ([7, 5, 8, 7, 6, 8, 7], [6, 8, 7]),  # the last time
        ([1, 2, 3], []),
        ([4], []),
        ([3, 4, 3, 4], [3, 4, 3]),  # a text that repeats itself goes on doing so
        ([5, 5], [5, 5, 5]),
    ],
)
def test_what_followed_the_longest_ngram_the_last_time(tokens, found):
    assert PromptLookup(3).drafter().propose(tokens, 3) == found


def test_ngrams_that_are_too_short_are_not_looked_for():
    assert PromptLookup(3, 2).drafter().propose([1, 2, 3, 2], 3) == []
    assert PromptLookup(3, 1).drafter().propose([1, 2, 3, 2], 1) == [3]


def test_a_table_that_grows_finds_what_a_new_one_finds():
    draw = random.Random(0)
    tokens = [draw.randrange(4) for _ in range(200)]
    table, at = NgramTable(range(3, 0, -1)), 0
    while at < 190:
        at += draw.randint(1, 9)
        assert table.propose(tokens[:at], 5) == NgramTable(range(3, 0, -1)).propose(tokens[:at], 5)


def test_there_is_a_proposer_only_if_it_is_asked_for():
    assert proposer_of(None) is None
    assert isinstance(proposer_of(SpeculationConfig()), PromptLookup)
