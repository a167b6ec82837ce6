"""Speculation: the draft tokens of one sequence, and how many it gets, from its acceptance so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

from aiakq.runtime.speculation.proposers import SequenceProposer

#: Maximum number of steps without draft tokens after all of the last ones were rejected.
_MAX_BACKOFF = 32


class Speculation:
    """The draft tokens of one sequence: more while they are accepted, fewer and in fewer steps while they are rejected.

    drafter                 its proposer; None: the executor proposes.
    num_speculative_tokens  maximum number of draft tokens in a step.
    """

    def __init__(self, drafter: SequenceProposer | None, num_speculative_tokens: int) -> None:
        self._drafter = drafter
        self._max_length = self._length = num_speculative_tokens
        self._num_misses = 0
        self._backoff = 0
        self._received: list[int] = []

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """At most ``max_tokens`` draft tokens to follow ``token_ids``: those received from the executor, if any."""
        received, self._received = self._received, []
        if self._backoff:
            self._backoff -= 1
        elif not received and self._drafter is not None:
            return self._drafter.propose(token_ids, min(max_tokens, self._length))
        return received[:max_tokens]

    def num_requested(self, max_tokens: int, has_grammar: bool) -> int:
        """How many draft tokens to request from the executor, at most ``max_tokens``; they come back in ``receive``.

        has_grammar  whether a grammar may force the next tokens.
        """
        if not has_grammar and (self._backoff or self._drafter is not None):
            return 0
        return max(0, min(max_tokens, self._max_length if has_grammar else self._length))

    def receive(self, tokens: list[int]) -> None:
        """Take the draft tokens that the executor proposed."""
        self._received = tokens

    def finish(self, token_ids: list[int]) -> None:
        """The sequence has ended, with ``token_ids``."""
        if self._drafter is not None:
            self._drafter.finish(token_ids)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """``num_accepted`` of the last ``num_drafts`` draft tokens were accepted."""
        if num_accepted == num_drafts:
            self._length = min(self._max_length, 2 * self._length)
        else:
            self._length = max(1, num_accepted + 1)
        self._num_misses = 0 if num_accepted else self._num_misses + 1
        self._backoff = min((1 << min(self._num_misses, 10)) - 1, _MAX_BACKOFF)


@dataclass
class DraftCounts:
    """Counters of speculative decoding since the start.

    steps     verifications: times that a sequence had draft tokens in a step.
    drafts    draft tokens.
    accepted  accepted draft tokens; ``by_position``: of the first, second, ... draft token of a verification.
    """

    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """One sequence had ``num_drafts`` in a step."""
        self.steps += 1
        self.drafts += num_drafts
        self.accepted += num_accepted
        self.by_position += [0] * (num_drafts - len(self.by_position))
        for position in range(num_accepted):
            self.by_position[position] += 1

    def copy(self) -> DraftCounts:
        """The counts as they are now."""
        return DraftCounts(self.steps, self.drafts, self.accepted, list(self.by_position))

    def __add__(self, other: DraftCounts) -> DraftCounts:
        """Those of two engines together."""
        by_position = [one + two for one, two in zip_longest(self.by_position, other.by_position, fillvalue=0)]
        return DraftCounts(
            self.steps + other.steps, self.drafts + other.drafts, self.accepted + other.accepted, by_position
        )
