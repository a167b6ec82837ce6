"""A pipeline for the simulator: stages behind the engine's process that carry out its batches later, in order."""

from __future__ import annotations

from collections import deque

import msgspec
from model import Fault, PagedExecutor

from aiakq.runtime.engine.executor import CommandsDone, PendingStep
from aiakq.runtime.protocol.step import StepBatch, StepResult


class StagedExecutor(PagedExecutor):
    """A memory that sees a batch only when the results of its step are collected, as the last stage may.

    A batch crosses to other processes as bytes, so that what the engine changes later does not change it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._queue: deque[StagedStep] = deque()

    def begin(self, fault: Fault | None) -> None:
        """See PagedExecutor."""
        short = self.fault, self._limit
        super().begin(fault)
        if any(step.is_lost for step in self._queue):
            self.fault, self._limit = short

    def submit(self, batch: StepBatch) -> PendingStep:
        """See ``Executor``."""
        if not batch.chunks:
            self.reset()
            return CommandsDone()
        self.cleared.update(batch.cleared_pages)
        step = StagedStep(self, msgspec.msgpack.encode(batch), self.epoch)
        # Behind a step that did not run none does.
        step.is_lost = bool(self._queue) and self._queue[-1].is_lost
        self._queue.append(step)
        return step

    def collect(self, step: StagedStep) -> StepResult:  # type: ignore[override]
        """See ``PendingStep``."""
        assert self._queue.popleft() is step
        batch, now = msgspec.msgpack.decode(step.batch, type=StepBatch), self.epoch
        self.epoch = step.epoch
        try:
            return self._results(step, batch)
        finally:
            self.epoch = now

    def _results(self, step: StagedStep, batch: StepBatch) -> StepResult:
        if step.is_lost:
            lost = self.apply(batch)
            lost.rows = [self._row(chunk, state) for chunk, state in zip(lost.chunks, lost.states, strict=True)]
            self._does_not_run(lost)
            return StepResult(out_of_memory=True)
        result = super().collect(super().submit(batch))
        if result.out_of_memory:
            for behind in self._queue:
                behind.is_lost = True
        return result

    def reset(self) -> None:
        """See PagedExecutor."""
        for step in self._queue:
            self.apply(msgspec.msgpack.decode(step.batch, type=StepBatch))
        self._queue.clear()
        super().reset()


class StagedStep:
    """A pending step, as bytes, and the epoch in which it was submitted. is_lost: whether it does not run, because one
    before did not.
    """

    def __init__(self, executor: StagedExecutor, batch: bytes, epoch: int) -> None:
        self.batch, self.epoch, self.is_lost = batch, epoch, False
        self._executor = executor

    def collect(self) -> StepResult:
        """See ``PendingStep``."""
        return self._executor.collect(self)
