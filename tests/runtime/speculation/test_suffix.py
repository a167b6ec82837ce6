"""Suffix decoding: the most frequent continuation of the longest suffix, within a scope and within bounds."""

from __future__ import annotations

import itertools
import random

import pytest

from aiakq.runtime.speculation import suffix
from aiakq.runtime.speculation.config import SpeculationConfig
from aiakq.runtime.speculation.suffix import SuffixIndex, SuffixProposer, SuffixSettings


def proposer(**keys) -> SuffixProposer:
    config = SpeculationConfig(method="suffix", **{f"suffix_decoding_{name}": value for name, value in keys.items()})
    return SuffixProposer.from_config(config)


def alone(tokens: list[int], max_tokens: int = 10, **keys) -> list[int]:
    return proposer(**keys).new_sequence(b"", len(tokens)).propose(tokens, max_tokens)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6]),  # as many as were matched
        ([1, 2, 7, 5, 1, 2, 8, 6, 1, 2, 8, 4, 1, 2], [8, 4]),  # the most frequent one
        ([2, 7, 3, 2, 8, 9, 2], [8]),  # of equally frequent ones the latest
        ([1, 2, 3], []),
        ([4], []),
        ([3, 4, 3, 4, 3, 4], [3, 4, 3, 4]),  # a text that repeats itself goes on doing so
    ],
)
def test_the_most_frequent_continuation_of_the_longest_suffix(tokens, found):
    assert alone(tokens) == found


def test_the_longest_suffix_decides_even_if_shorter_ones_are_frequent():
    tokens = [1, 2, 3, 4, 9, *[3, 5] * 5, 9, 1, 2, 3]
    assert alone(tokens, 1) == [4]


def test_unlikely_tokens_are_not_proposed():
    tokens = [1, 2, 1, 3, 1, 4, 1, 5, 1, 6, 1]
    assert alone(tokens, min_token_prob=0.25) == []
    assert alone(tokens, min_token_prob=0.2) == [6]


def test_keys_bound_the_number_of_draft_tokens():
    tokens = [*range(50), 99, *range(40)]
    assert alone(tokens, 30) == list(range(40, 50)) + [99, 0]  # depth 24: 12 of each
    assert alone(tokens, 30, max_spec_factor=0.5) == list(range(40, 48))
    assert alone(tokens, 30, max_tree_depth=8) == [40, 41, 42, 43]
    assert alone(tokens, 2) == [40, 41]


def test_a_sequence_that_grows_gets_what_a_new_one_gets():
    draw = random.Random(0)
    tokens = [draw.randrange(4) for _ in range(300)]
    growing, at = proposer(max_cached_requests=0).new_sequence(b"", 5), 0
    while at < 290:
        at += draw.randint(1, 9)
        assert growing.propose(tokens[:at], 5) == alone(tokens[:at], 5)


OUTPUT = [11, 12, 13, 14, 15, 16, 17, 18]


def test_outputs_of_earlier_requests_are_searched_and_prompts_are_not():
    shared = proposer()
    shared.new_sequence(b"", 2).finish([1, 2, *OUTPUT])
    assert shared.new_sequence(b"", 3).propose([11, 12, 13], 3) == [14, 15, 16]
    assert shared.new_sequence(b"", 1).propose([1], 3) == []


def test_outputs_are_shared_in_parts_while_they_are_generated():
    shared = proposer()
    first, second = shared.new_sequence(b"", 1), shared.new_sequence(b"", 1)
    output = list(range(11, 11 + suffix.PUBLISHED_TOKENS))
    first.propose([1, *output[:-1]], 1)
    assert second.propose([1, 11, 12], 2) == [], "indexing takes time: not in every step"
    first.propose([1, *output], 1)
    assert second.propose([1, 11, 12], 2) == [13, 14]


def test_long_sequences_are_indexed_in_parts_and_found_again(monkeypatch):
    monkeypatch.setattr(suffix, "SEARCHED_TOKENS", 30)
    tokens = list(range(200))
    drafts = proposer(max_cached_requests=0).new_sequence(b"", 5)
    for count in (50, 100, 200):
        drafts.propose(tokens[:count], 4)
    assert len(drafts._text) < 60
    for first in (3, 66, 101, 168, 190):
        assert drafts.propose(tokens + tokens[first : first + 4], 4) == tokens[first + 4 : first + 8]
        tokens = tokens + tokens[first : first + 4]


def by_definition(tokens: list[int], depth: int, max_tokens: int) -> list[int]:
    """The most frequent continuation of the longest suffix, compared token by token."""

    def length(end: int) -> int:
        pairs = zip(reversed(tokens[:end]), reversed(tokens), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], itertools.islice(pairs, depth)))

    lengths = {end: length(end) for end in reversed(range(1, len(tokens)))}
    longest = max(lengths.values())
    count = min(max_tokens, longest, depth // 2)
    ends = [end for end in lengths if lengths[end] >= min(longest, depth - count) > 0]
    found: list[int] = []
    probability = 1.0
    while len(found) < count:
        following = [(tokens + found)[end + len(found)] for end in ends]
        best = max(following, key=lambda token: (following.count(token), -following.index(token)))
        probability *= following.count(best) / len(ends)
        if probability < 0.1:
            break
        found.append(best)
        ends = [end for end, token in zip(ends, following, strict=True) if token == best]
    return found


@pytest.mark.parametrize("searched", [8, 2048])
@pytest.mark.parametrize("num_tokens", [6, 30, 500])
def test_proposals_are_those_of_the_definition(searched, num_tokens, monkeypatch):
    """Whether tokens are searched or indexed."""
    monkeypatch.setattr(suffix, "SEARCHED_TOKENS", searched)
    draw = random.Random(3)
    tokens = [draw.randrange(num_tokens) for _ in range(60)]
    while len(tokens) < 200:
        first = draw.randrange(len(tokens))
        tokens += tokens[first : first + draw.randint(1, 30)]
        tokens.append(draw.randrange(num_tokens))
    drafts = proposer(max_cached_requests=0).new_sequence(b"", 5)
    at = 5
    while at < 200:
        assert drafts.propose(tokens[:at], 8) == by_definition(tokens[:at], 24, 8)
        at += draw.randint(1, 5)
    assert (drafts._older is not None) == (searched < 200)


def test_other_scopes_learn_nothing():
    shared = proposer()
    shared.new_sequence(b"one", 0).finish(OUTPUT)
    assert shared.new_sequence(b"other", 3).propose([11, 12, 13], 3) == []
    assert shared.new_sequence(b"one", 3).propose([11, 12, 13], 3) == [14, 15, 16]


def test_without_cached_requests_nothing_is_shared():
    shared = proposer(max_cached_requests=0)
    shared.new_sequence(b"", 0).finish(OUTPUT)
    assert shared.new_sequence(b"", 3).propose([11, 12, 13], 3) == []
    assert shared.num_cached_tokens == 0


def test_the_oldest_output_is_evicted_first():
    shared = proposer(max_cached_requests=2)
    for start in (100, 200, 300):
        shared.new_sequence(b"", 0).finish(list(range(start, start + 10)))
    # The sequences that ask are requests as well, but have no output yet.
    assert shared.continuation(b"", [100, 101], 1).tokens == []
    assert shared.continuation(b"", [200, 201], 1).tokens == [202]
    assert shared.continuation(b"", [300, 301], 1).tokens == [302]


def test_cached_tokens_are_bounded_and_what_is_evicted_leaves_nothing(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_CACHED_TOKENS", 500)
    monkeypatch.setattr(suffix, "MAX_OCCURRENCES", 5)
    shared, draw = proposer(), random.Random(1)
    for number in range(60):
        scope = b"ab"[number % 2 :][:1]
        sequence = shared.new_sequence(scope, 3)
        tokens = [draw.randrange(6) for _ in range(draw.randint(4, 80))]
        for at in range(4, len(tokens), 7):
            sequence.propose(tokens[:at], 4)
        sequence.finish(tokens)
        assert shared.num_cached_tokens <= 500
    entries = [entry for index in shared._indices.values() for entry in index._occurrences.values()]
    assert 0 < sum(1 if isinstance(entry, int) else len(entry) for entry in entries) <= 3 * 500
    shared._max_requests = 0
    shared.append(max(shared._scopes), [1])
    assert shared._indices == {} and shared.num_cached_tokens == 0


def test_a_removed_text_leaves_an_index_as_if_it_had_never_been_there():
    draw = random.Random(2)
    texts = [[draw.randrange(5) for _ in range(40)] for _ in range(6)]
    index, other = (SuffixIndex(SuffixSettings(24, 1.0, 0.1)) for _ in range(2))
    for number, text in enumerate(texts):
        index.append(number, text)
        if number % 2:
            other.append(number, text)
    for number in (0, 2, 4):
        assert index.remove(number) == 40
    assert index._occurrences == other._occurrences and len(index) == 3


def test_an_evicted_output_takes_no_more_tokens():
    shared = proposer(max_cached_requests=1)
    old, new = shared.new_sequence(b"", 0), shared.new_sequence(b"", 0)
    old.finish(OUTPUT)
    new.finish([21, 22, 23])
    old.finish([*OUTPUT, 19])
    assert shared.num_cached_tokens == 3
