"""Bugs of speculative decoding to plant: the simulator must find each of them. See planted_bugs.py.

Bugs of the sampler, which the simulator does not run, are in tests/runtime/executor/test_sampled_step.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planted_bugs import Patch

from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.protocol.step import ChunkResult
from aiakq.runtime.speculation.planner import DraftPlanner


def rejected_tokens_count_as_computed(patch: Patch) -> None:
    """Keys and values of rejected tokens are not written again."""
    patch(ScheduledChunk, "accept", lambda self, num_drafts: None)


def tokens_are_accepted_past_the_end(patch: Patch) -> None:
    """Draft tokens after a stop token are accepted too."""
    num_left = 0

    def append(self: Engine, chunk: ScheduledChunk, result: ChunkResult, now: float) -> Any:
        nonlocal num_left
        num_left = len(result.sampled)
        return real_append(self, chunk, result, now)

    def finish_reason(self: Sequence, token: int, is_complete: bool = False) -> Any:
        nonlocal num_left
        num_left -= 1
        return (None, None) if num_left > 0 else real_reason(self, token, is_complete)

    real_append, real_reason = Engine._append, Sequence.finish_reason
    patch(Engine, "_append", append)
    patch(Sequence, "finish_reason", finish_reason)


def draft_tokens_exceed_max_tokens(patch: Patch) -> None:
    """Draft tokens go beyond the last token of a request."""
    real: Any = Sequence.max_draft_tokens
    patch(Sequence, "max_draft_tokens", property(lambda self: 100 * bool(real.fget(self))))
    patch(ScheduledChunk, "max_requested_drafts", lambda self, max_model_len: 6)


def draft_tokens_preempt(patch: Patch) -> None:
    """Sequences are preempted to make room for draft tokens."""
    schedulers: dict[DraftPlanner, Scheduler] = {}

    def init(self: Scheduler, *arguments: Any) -> None:
        real_init(self, *arguments)
        planner = self.resource(DraftPlanner)
        if planner is not None:
            schedulers[planner] = self

    def grow(self: DraftPlanner, sequence: Sequence, count: int, num_running: int) -> bool:
        scheduler = schedulers[self]
        while not self._pool.extend(sequence.pages, sequence.num_computed_tokens + count):
            scheduler.preempt(scheduler.running[-1])
        return True

    real_init = Scheduler.__init__
    patch(Scheduler, "__init__", init)
    patch(DraftPlanner, "_grow", grow)


def steps_run_ahead_of_draft_tokens(patch: Patch) -> None:
    """A step is scheduled although a pending one has draft tokens, and how many it accepts is not known yet."""
    patch(Scheduler, "awaits_results", lambda self: False)


#: Bugs that show only with draft tokens.
BUGS: list[Callable[[Patch], None]] = [
    rejected_tokens_count_as_computed,
    tokens_are_accepted_past_the_end,
    draft_tokens_exceed_max_tokens,
    draft_tokens_preempt,
    steps_run_ahead_of_draft_tokens,
]
