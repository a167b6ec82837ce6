"""Bugs of speculative decoding to plant: each must be found by the simulator. See planted.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planted import Patch

from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.speculation.speculation import Speculation


def wrong_guesses_count_as_computed(patch: Patch) -> None:
    """Keys and values of tokens that are not there are not written again."""
    patch(ScheduledChunk, "accept", lambda self, num_drafts: None)


def guesses_are_kept_past_the_end(patch: Patch) -> None:
    """What was guessed behind a token that ends the text is told too."""
    left = 0

    def append(self: Engine, chunk: ScheduledChunk, tokens: list[Any], now: float) -> Any:
        nonlocal left
        left = len(tokens)
        return real_append(self, chunk, tokens, now)

    def finish_reason(self: Sequence, token: int, is_complete: bool = False) -> Any:
        nonlocal left
        left -= 1
        return (None, None) if left > 0 else real_reason(self, token, is_complete)

    real_append, real_reason = Engine._append, Sequence.finish_reason
    patch(Engine, "_append", append)
    patch(Sequence, "finish_reason", finish_reason)


def more_is_guessed_than_is_wanted(patch: Patch) -> None:
    """Guesses go beyond the last token of a request."""
    real: Any = Sequence.most_drafts
    patch(Sequence, "most_drafts", property(lambda self: 100 * bool(real.fget(self))))
    patch(Speculation, "wanted", lambda self, most, has_grammar: 6)


def guesses_preempt(patch: Patch) -> None:
    """Somebody loses its pages for a guess."""

    def grow(self: Scheduler, sequence: Sequence, count: int) -> bool:
        while not self._grow(sequence, count):
            self._preempt(self.running.pop())
        return True

    patch(Scheduler, "_grow_for_drafts", grow)


#: Those that only show where tokens are guessed.
BUGS: list[Callable[[Patch], None]] = [
    wrong_guesses_count_as_computed,
    guesses_are_kept_past_the_end,
    more_is_guessed_than_is_wanted,
    guesses_preempt,
]
