"""What guesses tokens: the protocol, and prompt lookup."""

from __future__ import annotations

from typing import Protocol

from aiakq.runtime.config.speculation import NGRAM, SpeculationConfig


class Drafter(Protocol):
    """Guesses the next tokens of one sequence."""

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """At most ``most`` tokens that may follow ``token_ids``, which only grow from call to call."""


class Proposer(Protocol):
    """A way to guess."""

    def drafter(self) -> Drafter:
        """That of a new sequence."""


class PromptLookup:
    """What followed the last time that the last few tokens of a sequence occurred in it (Saxena 2023).

    longest, shortest  n-grams that are looked for, the longest first.
    """

    def __init__(self, longest: int, shortest: int = 1) -> None:
        self._lengths = range(longest, shortest - 1, -1)

    def drafter(self) -> NgramTable:
        """See ``Proposer``."""
        return NgramTable(self._lengths)


class NgramTable:
    """Where each n-gram of a sequence has ended last. A new token takes as many entries as there are lengths."""

    def __init__(self, lengths: range) -> None:
        self._lengths = lengths
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_known = 0

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """See ``Drafter``."""
        # The n-grams at the very end come in with the next token: they are what is looked for.
        for place in range(self._num_known + 1, len(token_ids)):
            for length in self._lengths:
                if length <= place:
                    self._ends[tuple(token_ids[place - length : place])] = place
        self._num_known = max(self._num_known, len(token_ids) - 1)
        for length in self._lengths:
            if length < len(token_ids):
                end = self._ends.get(tuple(token_ids[-length:]))
                if end is not None:
                    return _continued(token_ids, end, most)
        return []


def _continued(token_ids: list[int], start: int, count: int) -> list[int]:
    """``count`` tokens from ``start`` on; where they end, they go on as what they have become: a text that repeats
    itself.
    """
    found = token_ids[start : start + count]
    period = len(token_ids) - start
    while len(found) < count:
        found.append(found[len(found) - period])
    return found


def proposer_of(config: SpeculationConfig | None) -> Proposer | None:
    """The proposer that ``config`` asks for; None without, or where the executor guesses."""
    if config is None or config.method != NGRAM:
        return None
    return PromptLookup(config.prompt_lookup_max, config.prompt_lookup_min)
