"""Every stage of a pipeline is busy: as many steps are in flight as there are stages."""

from __future__ import annotations

import random

import pytest
from scheduler_configs import scheduler_config

from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.protocol.admission import admit
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.request import RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import ChunkResult, SampledToken, StepBatch, StepResult


class TimedStages:
    """An executor that computes only the time that each stage takes. Rank 0 computes the first stage in ``submit``.

    now   of rank 0, in seconds.
    free  when each stage has finished.
    busy  seconds for which each stage computed.
    """

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.free = [0.0] * count
        self.busy = [0.0] * count

    def submit(self, batch: StepBatch) -> TimedStep:
        """See ``Executor``."""
        batch = batch.expanded()
        # Weights are read once a step; each token adds a little.
        seconds = 1 + 0.02 * sum(chunk.count for chunk in batch.chunks)
        at = self.now
        for stage in range(len(self.free)):
            at = self.free[stage] = max(at, self.free[stage]) + seconds
            self.busy[stage] += seconds
        self.now = self.free[0]
        return TimedStep(self, at, [chunk.samples for chunk in batch.chunks])


class TimedStep:
    """A pending step that is computed at ``end``."""

    def __init__(self, executor: TimedStages, end: float, samples: list[bool]) -> None:
        self._executor, self._end, self._samples = executor, end, samples

    def collect(self) -> StepResult:
        """See ``PendingStep``."""
        self._executor.now = max(self._executor.now, self._end)
        return StepResult([ChunkResult([SampledToken(9, 0.0)] if samples else []) for samples in self._samples])


def stage_use(stages: int, requests: list[tuple[int, int]], clients: int = 1) -> float:
    """Return the busy fraction of the least busy stage; ``requests`` are the tokens of prompts and outputs."""
    config = scheduler_config(max_num_seqs=64, max_num_batched_tokens=512, num_stages=stages)
    pool = PagePool(4096, 16, False)
    limits = ModelLimits(100, 8192, pool.num_usable * 16)
    executor = TimedStages(stages)
    engine = Engine(executor, Scheduler(pool, config), limits, {}, stages)
    inbox: list[RequestSpec] = []
    for number, (num_prompt, num_output) in enumerate(requests):
        params = SamplingParams(max_tokens=num_output, ignore_eos=True, seed=0)
        ids = [number % 90] * num_prompt
        inbox.append(admit(f"r{number}", ids, params, limits, 0, options=RequestOptions(client=f"c{number % clients}")))
    engine.step(executor.now, [*inbox])
    while engine.has_work():
        engine.step(executor.now, [])
        engine.check()
    return min(executor.busy) / executor.now


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_are_busy_with_as_many_decoding_sequences(stages, clients):
    assert stage_use(stages, [(16, 200)] * (4 * stages), clients) > 0.9
    assert stage_use(stages, [(16, 200)] * stages, clients) > 0.9


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_are_busy_with_one_long_prompt(stages):
    """Its chunks run one after the other; the last ones are small."""
    assert stage_use(stages, [(8000, 1)]) > 0.8


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_are_busy_with_mixed_requests(stages):
    draw = random.Random(1)
    assert stage_use(stages, [(draw.randrange(10, 900), draw.randrange(20, 200)) for _ in range(64)], 2) > 0.9


def test_one_sequence_keeps_one_stage_busy_at_a_time():
    assert 0.2 < stage_use(4, [(16, 100)]) < 0.3
