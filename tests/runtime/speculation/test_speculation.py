"""How many tokens are guessed: more while guesses are right, fewer while they are wrong."""

from __future__ import annotations

from aiakq.runtime.speculation.speculation import DraftCounts, Speculation


class Counting:
    """Guesses 0, 1, 2, ..."""

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        return list(range(most))


def lengths(speculation: Speculation, accepted: list[int]) -> list[int]:
    """How much was guessed in each step, of which so many were right at most."""
    found = []
    for right in accepted:
        drafts = speculation.propose([1], 100)
        found.append(len(drafts))
        if drafts:
            speculation.observe(len(drafts), min(right, len(drafts)))
    return found


def test_right_guesses_lead_to_more():
    assert lengths(Speculation(Counting(), 8), [8, 2, 8, 8, 8]) == [8, 8, 3, 6, 8]


def test_wrong_guesses_lead_to_steps_without():
    found = lengths(Speculation(Counting(), 4), [0] * 200)
    assert found[:9] == [4, 0, 1, 0, 0, 0, 1, 0, 0]
    assert 8 <= sum(found) <= 16
    assert max(len(run) for run in "".join(map(str, found)).split("1")) == 32, "but never for good"


def test_one_right_guess_ends_the_rest():
    speculation = Speculation(Counting(), 4)
    assert lengths(speculation, [0, 0, 1, 4, 4]) == [4, 0, 1, 2, 4]


def test_no_more_is_guessed_than_there_is_room_for():
    assert len(Speculation(Counting(), 8).propose([1], 3)) == 3


def test_guesses_are_counted_by_their_place():
    counts = DraftCounts()
    for num_drafts, num_accepted in ((3, 2), (1, 1), (4, 0)):
        counts.observe(num_drafts, num_accepted)
    before = counts.copy()
    counts.observe(2, 2)
    assert before == DraftCounts(3, 8, 3, [2, 1, 0, 0]) and counts == DraftCounts(4, 10, 5, [3, 2, 0, 0])
    assert before + DraftCounts(1, 5, 5, [1, 1, 1, 1, 1]) == DraftCounts(4, 13, 8, [3, 2, 1, 1, 1])
