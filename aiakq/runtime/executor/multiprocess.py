"""MultiprocessExecutor: rank 0 of a tensor-parallel group, which the other ranks follow."""

from __future__ import annotations

import weakref

from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.messages import Batch, Configure, Launch, ResetSequences, Sampled
from aiakq.runtime.distributed.rank_group import RankGroup, checkpoint_digest
from aiakq.runtime.engine.records import StepBatch, StepResult
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.executor.follower import digest
from aiakq.runtime.executor.local import LocalExecutor, LocalPendingStep
from aiakq.runtime.executor.runner import Runner, StepInput


def new_executor(
    runner: Runner, group: RankGroup | None, config: EngineConfig, num_pages: int, num_slots: int, bounds: Bounds
) -> LocalExecutor:
    """The executor of this process, which leads the ranks of ``group`` if there are any.

    Raises ``rank_failed`` and ``rank_late``.
    """
    max_pages = -(-bounds.length // config.cache.block_size)
    if group is None:
        return LocalExecutor(runner, num_slots, max_pages)
    group.wait_loaded(checkpoint_digest(config))
    group.configure(Configure(num_pages, num_slots, bounds.tokens, bounds.rows, bounds.length))
    return MultiprocessExecutor(runner, group, num_slots, max_pages)


class MultiprocessExecutor(LocalExecutor):
    """A LocalExecutor whose batches, and what it samples, also go to the other ranks of ``group``.

    Raises ``rank_failed`` and ``rank_late`` where a rank is lost; the group is then of no use any more.
    """

    def __init__(self, runner: Runner, group: RankGroup, num_slots: int, max_pages: int) -> None:
        super().__init__(runner, num_slots, max_pages)
        self._group = group
        weakref.finalize(self, group.close)

    def submit(self, batch: StepBatch) -> LocalPendingStep:
        """See ``Executor``."""
        self._group.send(Batch(batch))
        step = super().submit(batch)
        self._group.check()
        if step.out_of_memory:
            self._group.abandon_step()
        return step

    def collect(self, step: LocalPendingStep) -> StepResult:
        """See LocalExecutor."""
        result = super().collect(step)
        if not result.out_of_memory:
            last = [chunk.sampled[-1] if chunk.sampled else None for chunk in result.chunks]
            self._group.send(Sampled([token.token if token and token.is_valid else None for token in last]))
        return result

    def reset(self) -> None:
        """See ``Executor``."""
        super().reset()
        self._group.send(ResetSequences())

    def _launch_model(self, step: LocalPendingStep, step_input: StepInput) -> None:
        token_ids = step_input.model_input.token_ids
        unknown = [int(token_ids[place]) for place, _ in step_input.unknown]
        self._group.send(Launch(unknown, digest(step_input.model_input)))
        super()._launch_model(step, step_input)
        if self._group.collective.is_given_up:
            self._group.check()
            # The thread that notices the end of a rank may be behind; else a rank had not enough memory.
            raise MemoryError("a rank has not enough memory for the step")
