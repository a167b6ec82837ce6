"""The time that the engine itself takes for draft tokens, without a model: what small models wait for."""

from __future__ import annotations

import statistics
import time

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import Chunk, ChunkResult, SampledToken, StepBatch, StepResult
from aiakq.runtime.speculation.draft_length import StepCosts
from aiakq.runtime.speculation.planner import DraftPlanner

#: Steps with and without draft tokens that are timed, two of each in turns.
_STEPS = 32
_PAGE_SIZE = 16
#: Bytes that are read between two steps, in place of the weights of a model: they drive the engine's data out of the
#: caches of the processor.
_WEIGHTS = bytes(4 << 20)


class _RejectingExecutor:
    """An ``Executor`` without a model, which samples tokens that occurred before and reject every draft token."""

    def submit(self, batch: StepBatch) -> _Sampled:
        """See ``Executor``."""
        return _Sampled(batch.chunks)


class _Sampled:
    """A ``PendingStep``."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self._chunks = chunks

    def collect(self) -> StepResult:
        """See ``PendingStep``."""
        results = []
        for chunk in self._chunks:
            token = 1 + (chunk.first // 2) % 3
            if chunk.drafts and chunk.drafts[0] == token:
                token = 1 + token % 3
            results.append(ChunkResult([SampledToken(token, 0.0)], proposed=[1] * chunk.num_proposed))
        return StepResult(results)


def measure_bookkeeping(config: SchedulerConfig) -> tuple[float, float]:
    """Seconds of the engine in a step of one sequence, and how much longer it takes with draft tokens."""
    num_tokens = 6 + (2 * _STEPS + 2) * 2
    assert config.speculation is not None
    pool = PagePool(2 + num_tokens // _PAGE_SIZE, _PAGE_SIZE, False)
    planner = DraftPlanner(pool, config, config.speculation)
    planner.costs = StepCosts({1: 1.0, 1000: 1.0})  # every draft token is verified
    scheduler = Scheduler(pool, config, [planner])
    engine = Engine(_RejectingExecutor(), scheduler, ModelLimits(300, num_tokens, num_tokens), {})  # type: ignore[arg-type]
    engine.step(0.0, [RequestSpec("bookkeeping", [1, 2, 3] * 2, SamplingParams(), num_tokens, seed=0)])
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * _STEPS):
        planner.is_enabled = number % 4 >= 2  # two in a row: a model proposes for the next step
        bytearray(_WEIGHTS)
        before, started = engine.stats.drafts, time.perf_counter()
        engine.step(0.0, [])
        took = time.perf_counter() - started
        seconds[engine.stats.drafts is not before].append(took)
    without = statistics.median(seconds[False])
    drafts = statistics.median(seconds[True]) if seconds[True] else without
    return without, max(0.0, drafts - without)
