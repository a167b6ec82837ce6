"""MultiprocessExecutor: the executor of rank 0 of a tensor-parallel group, which drives the other ranks."""

from __future__ import annotations

import itertools
import weakref
from concurrent.futures import Future
from typing import Any

from msgspec.structs import replace

from aiakq.runtime.distributed.messages import Batch, Launch, Prepare, Sampled
from aiakq.runtime.distributed.rank_group import RankGroup
from aiakq.runtime.engine.executor import CommandsDone, PendingStep
from aiakq.runtime.executor.local import LocalExecutor, LocalPendingStep
from aiakq.runtime.executor.model_proposer import ModelProposer
from aiakq.runtime.executor.runner import Runner, StepInput
from aiakq.runtime.protocol.command import Preparation
from aiakq.runtime.protocol.step import StepBatch, StepResult


class MultiprocessExecutor(LocalExecutor):
    """A LocalExecutor that also sends its batches and sampled tokens to the other ranks of ``group``.

    Its methods raise ``rank_failed`` or ``rank_late`` if a rank is lost; the group cannot be used after that.
    """

    def __init__(
        self, runner: Runner, group: RankGroup, num_slots: int, max_pages: int, proposer: ModelProposer | None = None
    ) -> None:
        super().__init__(runner, num_slots, max_pages, proposer)
        assert group.collective is not None
        self._group, self._collective = group, group.collective
        self._numbers = itertools.count()
        self._number = 0  # number of the latest step
        weakref.finalize(self, group.close)

    def submit(self, batch: StepBatch) -> PendingStep:
        """See ``Executor``."""
        if batch.num_chunks:
            return super().submit(batch)
        self._group.send(Batch(replace(batch, commands=self._handlers.apply(batch.commands))))
        return CommandsDone()

    def _submit(self, batch: StepBatch) -> LocalPendingStep:
        self._number = next(self._numbers)
        self._group.send(Batch(batch))
        step = super()._submit(batch)
        self._group.check()
        if step.out_of_memory:
            self._group.abandon_steps(self._number)
        return step

    def collect(self, step: LocalPendingStep) -> StepResult:
        """See LocalExecutor."""
        result = super().collect(step)
        self._group.check_results()
        if not result.out_of_memory:
            self._group.send(Sampled(result.new_tokens()))
        return result

    def prepare(self, preparation: Preparation) -> Future[Any] | None:
        """See ``Executor``. Every rank starts what it needs; the future is that of this one."""
        self._group.send(Prepare(preparation))
        return super().prepare(preparation)

    def _launch_model(self, step: LocalPendingStep, step_input: StepInput) -> None:
        token_ids, collective = step_input.model_input.token_ids, self._collective
        known = () if collective.can_broadcast else step_input.unknown
        tokens = [int(token_ids[index]) for index in known]
        self._group.send(Launch(self._number, tokens, step_input.digest()))
        launch = super()._launch_model

        def compute() -> None:
            if step_input.unknown and collective.can_broadcast:
                collective.broadcast(token_ids)
            launch(step, step_input)

        self._group.launch(compute)
