"""N-gram lookup: what followed the same tokens the last time."""

from __future__ import annotations

import random

import pytest

from aiakq.runtime.speculation import ngram
from aiakq.runtime.speculation.config import SpeculationConfig
from aiakq.runtime.speculation.ngram import NgramProposer, NgramTable


def table(longest: int, shortest: int = 1) -> NgramTable:
    config = SpeculationConfig(prompt_lookup_max=longest, prompt_lookup_min=shortest)
    return NgramProposer.from_config(config).new_sequence(b"", 0)


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
    assert table(3).propose(tokens, 3) == found


def test_ngrams_that_are_too_short_are_not_looked_up():
    assert table(3, 2).propose([1, 2, 3, 2], 3) == []
    assert table(3, 1).propose([1, 2, 3, 2], 1) == [3]


def by_definition(tokens: list[int], longest: int, count: int) -> list[int]:
    """What followed the last occurrence of the longest n-gram, compared token by token."""
    for size in range(longest, 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                found = tokens[end:]
                return (found * count)[:count]
    return []


@pytest.mark.parametrize("searched", [5, 8192])
@pytest.mark.parametrize("num_tokens", [4, 40])
def test_a_table_that_grows_keeps_its_entries(searched, num_tokens, monkeypatch):
    """Whether tokens are searched or indexed."""
    monkeypatch.setattr(ngram, "SEARCHED_TOKENS", searched)
    draw = random.Random(0)
    tokens = [draw.randrange(num_tokens) for _ in range(200)]
    growing, at = table(3), 0
    while at < 190:
        at += draw.randint(1, 9)
        assert growing.propose(tokens[:at], 5) == by_definition(tokens[:at], 3, 5)
    assert bool(growing._ends) == (searched < 200)
