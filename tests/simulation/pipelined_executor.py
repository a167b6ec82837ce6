"""A fake executor of a pipeline: later stages apply the engine's batches after it has submitted more of them."""

from __future__ import annotations

from collections import deque

import msgspec
from fake_executor import Fault, PagedExecutor

from aiakq.runtime.engine.executor import CommandsDone, PendingStep
from aiakq.runtime.protocol.step import StepBatch, StepResult


class PipelinedExecutor(PagedExecutor):
    """Applies a batch only when the results of its step are collected, as the last stage may.

    Batches are kept as bytes, as they are sent to other processes: later changes by the engine do not reach them.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self._queue: deque[PipelinedStep] = deque()

    def begin(self, fault: Fault | None) -> None:
        """See PagedExecutor."""
        shortage = self.fault, self._limit
        super().begin(fault)
        if any(step.is_lost for step in self._queue):
            self.fault, self._limit = shortage

    def submit(self, batch: StepBatch) -> PendingStep:
        """See ``Executor``."""
        if not batch.num_chunks:
            self.reset()
            return CommandsDone()
        self.cleared_pages.update(batch.cleared_pages)
        step = PipelinedStep(self, msgspec.msgpack.encode(batch), self.epoch)
        # Steps after one that did not run do not run either.
        step.is_lost = bool(self._queue) and self._queue[-1].is_lost
        self._queue.append(step)
        return step

    def collect(self, step: PipelinedStep) -> StepResult:  # type: ignore[override]
        """See ``PendingStep``."""
        assert self._queue.popleft() is step
        batch, now = msgspec.msgpack.decode(step.batch, type=StepBatch), self.epoch
        self.epoch = step.epoch
        try:
            return self._results(step, batch)
        finally:
            self.epoch = now

    def _results(self, step: PipelinedStep, batch: StepBatch) -> StepResult:
        if step.is_lost:
            lost = self.apply(batch)
            lost.rows = [self._row(chunk, state) for chunk, state in zip(lost.chunks, lost.states, strict=True)]
            self._cancel(lost)
            return StepResult(out_of_memory=True)
        result = super().collect(super().submit(batch))
        if result.out_of_memory:
            for later in self._queue:
                later.is_lost = True
        return result

    def reset(self) -> None:
        """See PagedExecutor."""
        for step in self._queue:
            self.apply(msgspec.msgpack.decode(step.batch, type=StepBatch))
        self._queue.clear()
        super().reset()


class PipelinedStep:
    """A pending step: its batch as bytes and the cache epoch in which it was submitted.

    is_lost  whether it does not run because a step before it did not.
    """

    def __init__(self, executor: PipelinedExecutor, batch: bytes, epoch: int) -> None:
        self.batch, self.epoch, self.is_lost = batch, epoch, False
        self._executor = executor

    def collect(self) -> StepResult:
        """See ``PendingStep``."""
        return self._executor.collect(self)
