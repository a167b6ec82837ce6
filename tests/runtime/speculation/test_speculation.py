"""Draft lengths: longer while draft tokens are accepted, shorter while they are rejected."""

from __future__ import annotations

from aiakq.runtime.speculation.speculation import DraftCounts, Speculation


class Counting:
    """Proposes 0, 1, 2, ..."""

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        return list(range(max_tokens))


def lengths(speculation: Speculation, accepted: list[int]) -> list[int]:
    """The draft length in each step, in which at most so many draft tokens are accepted."""
    found = []
    for most in accepted:
        drafts = speculation.propose([1], 100)
        found.append(len(drafts))
        if drafts:
            speculation.observe(len(drafts), min(most, len(drafts)))
    return found


def test_accepted_tokens_lead_to_longer_drafts():
    assert lengths(Speculation(Counting(), 8), [8, 2, 8, 8, 8]) == [8, 8, 3, 6, 8]


def test_rejected_tokens_lead_to_steps_without_drafts():
    found = lengths(Speculation(Counting(), 4), [0] * 200)
    assert found[:9] == [4, 0, 1, 0, 0, 0, 1, 0, 0]
    assert 8 <= sum(found) <= 16
    assert max(len(run) for run in "".join(map(str, found)).split("1")) == 32, "but never for good"


def test_one_accepted_token_ends_the_backoff():
    speculation = Speculation(Counting(), 4)
    assert lengths(speculation, [0, 0, 1, 4, 4]) == [4, 0, 1, 2, 4]


def test_a_draft_is_no_longer_than_the_caller_allows():
    assert len(Speculation(Counting(), 8).propose([1], 3)) == 3


def test_accepted_tokens_are_counted_by_position():
    counts = DraftCounts()
    for num_drafts, num_accepted in ((3, 2), (1, 1), (4, 0)):
        counts.observe(num_drafts, num_accepted)
    before = counts.copy()
    counts.observe(2, 2)
    assert before == DraftCounts(3, 8, 3, [2, 1, 0, 0]) and counts == DraftCounts(4, 10, 5, [3, 2, 0, 0])
    assert before + DraftCounts(1, 5, 5, [1, 1, 1, 1, 1]) == DraftCounts(4, 13, 8, [3, 2, 1, 1, 1])
