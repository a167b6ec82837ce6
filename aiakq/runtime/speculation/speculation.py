"""Speculation: how many tokens of a sequence are guessed, from how many guesses were right."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

from aiakq.runtime.speculation.proposers import Drafter

#: Steps without a guess after guesses that were all wrong, at most.
_MAX_REST = 32


class Speculation:
    """The guesses of one sequence: more while they are right, fewer and in fewer steps while they are wrong.

    drafter  None: the executor guesses.
    most     guesses in a step.
    """

    def __init__(self, drafter: Drafter | None, most: int) -> None:
        self._drafter = drafter
        self._most = self._length = most
        self._num_misses = 0
        self._rest = 0
        self._taken: list[int] = []

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``token_ids``: those taken from the executor, if there are any."""
        taken, self._taken = self._taken, []
        if self._rest:
            self._rest -= 1
        elif not taken and self._drafter is not None:
            return self._drafter.propose(token_ids, min(most, self._length))
        return taken[:most]

    def wanted(self, most: int, has_grammar: bool) -> int:
        """Guesses that the executor is asked for, at most ``most``; what it guesses is given to ``take``.

        has_grammar  whether it may know what has to follow.
        """
        if not has_grammar and (self._rest or self._drafter is not None):
            return 0
        return max(0, min(most, self._most if has_grammar else self._length))

    def take(self, tokens: list[int]) -> None:
        """The executor guesses that ``tokens`` follow."""
        self._taken = tokens

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """So many of the last guesses were right."""
        if num_accepted == num_drafts:
            self._length = min(self._most, 2 * self._length)
        else:
            self._length = max(1, num_accepted + 1)
        self._num_misses = 0 if num_accepted else self._num_misses + 1
        self._rest = min((1 << min(self._num_misses, 10)) - 1, _MAX_REST)


@dataclass
class DraftCounts:
    """Guesses since the start.

    steps     in which a sequence had guesses.
    drafts    guessed tokens.
    accepted  of them, right ones; ``by_place``: of those guessed first, second, ...
    """

    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    by_place: list[int] = field(default_factory=list)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """One sequence had ``num_drafts`` in a step."""
        self.steps += 1
        self.drafts += num_drafts
        self.accepted += num_accepted
        self.by_place += [0] * (num_drafts - len(self.by_place))
        for place in range(num_accepted):
            self.by_place[place] += 1

    def copy(self) -> DraftCounts:
        """The counts as they are now."""
        return DraftCounts(self.steps, self.drafts, self.accepted, list(self.by_place))

    def __add__(self, other: DraftCounts) -> DraftCounts:
        """Those of two engines together."""
        by_place = [one + two for one, two in zip_longest(self.by_place, other.by_place, fillvalue=0)]
        return DraftCounts(
            self.steps + other.steps, self.drafts + other.drafts, self.accepted + other.accepted, by_place
        )
