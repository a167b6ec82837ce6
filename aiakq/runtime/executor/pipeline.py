"""PipelineExecutor: the executor of rank 0 with pipeline parallelism. It runs the first stage; the last stage samples.

Up to one step per stage is in flight, each with different sequences. Steps pass through every stage in the order of
submission, so that each reads the KV cache as earlier steps wrote it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Any

import torch
from msgspec.structs import replace

from aiakq.runtime.distributed.collectives import is_lost
from aiakq.runtime.distributed.messages import Batch, Launch, Prepare, Sampled
from aiakq.runtime.distributed.rank_group import RankGroup
from aiakq.runtime.engine.executor import CommandsDone, PendingStep
from aiakq.runtime.executor.commands import CommandHandlers
from aiakq.runtime.executor.local import fits
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sequences import RunningSequences, SequenceState
from aiakq.runtime.models.interface import StageOutput
from aiakq.runtime.protocol.command import Preparation, ResetSequences
from aiakq.runtime.protocol.step import ChunkResult, StepBatch, StepResult


class PipelinedStep:
    """A step that was submitted to the first stage.

    result  result of the step; None while later stages compute it.
    """

    def __init__(self, executor: PipelineExecutor, number: int, sequences: list[SequenceState]) -> None:
        self.number, self.sequences = number, sequences
        self.result: StepResult | None = None
        self._executor = executor

    @property
    def out_of_memory(self) -> bool:
        """Whether the step was abandoned because a rank ran out of memory."""
        return self.result is not None and self.result.out_of_memory

    def collect(self) -> StepResult:
        """See ``PendingStep``."""
        return self._executor.collect(self)


class PipelineExecutor:
    """An ``Executor`` over the ``Runner`` of the first stage and the ranks of ``group``.

    num_slots  number of sequence slots.
    max_pages  maximum number of pages of a sequence.

    Its methods raise ``rank_failed`` or ``rank_late`` if a rank is lost; the group cannot be used after that.
    """

    def __init__(self, runner: Runner, group: RankGroup, num_slots: int, max_pages: int) -> None:
        assert group.link is not None
        self.runner = runner
        self._group, self._link = group, group.link
        self._sequences = RunningSequences(num_slots, max_pages, runner.parts)
        self._pending: deque[PipelinedStep] = deque()
        self._numbers = itertools.count()
        weakref.finalize(self, group.close)

    @property
    def _handlers(self) -> CommandHandlers:
        # Not kept, as in LocalExecutor.
        return CommandHandlers({ResetSequences: self._reset}, self.runner.parts)

    @torch.inference_mode()
    def submit(self, batch: StepBatch) -> PendingStep:
        """See ``Executor``. No chunk may end with a token that is still being sampled."""
        if batch.commands:
            batch = replace(batch, commands=self._handlers.apply(batch.commands))
        batch = batch.expanded()
        self._group.send(Batch(batch))
        if not batch.chunks:
            return CommandsDone()
        sequences = self._sequences.update(batch, {})
        if batch.cleared_pages:
            self.runner.clear(batch.cleared_pages)
        step = PipelinedStep(self, next(self._numbers), sequences)
        follows_abandoned = bool(self._pending) and self._pending[-1].out_of_memory
        self._pending.append(step)
        if follows_abandoned:
            step.result = StepResult(out_of_memory=True)
        elif not fits(lambda: self._compute(step, batch)):
            for earlier in self._pending:
                if earlier is not step and earlier.result is None:
                    earlier.result = self._receive(earlier)
            self._abandon(step)
        self._group.check()
        return step

    def collect(self, step: PipelinedStep) -> StepResult:
        """Return the results of ``step``, which must be the oldest pending step."""
        oldest = self._pending.popleft()
        assert oldest is step, "steps are collected in order"
        if step.result is None:
            step.result = self._receive(step)
        return step.result

    def prepare(self, preparation: Preparation) -> Future[Any] | None:
        """See ``Executor``. Every rank starts what it needs; the future is that of this one."""
        self._group.send(Prepare(preparation))
        return self._handlers.prepare(preparation)

    def _reset(self, command: ResetSequences) -> None:
        if self._pending:
            self._group.abandon_steps(self._pending[0].number)
        self._pending.clear()
        self._sequences.clear()

    def _compute(self, step: PipelinedStep, batch: StepBatch) -> None:
        step_input = self.runner.prepare(batch.chunks, step.sequences, self._sequences)
        assert not step_input.unknown, "a sequence has one token pending"
        self._group.send(Launch(step.number, [], step_input.digest()))
        hidden = self._group.launch(lambda: self.runner.forward(step_input.model_input))
        assert isinstance(hidden, StageOutput)
        self._link.send(step.number, hidden, lambda: not is_lost(self._group.collective))

    def _receive(self, step: PipelinedStep) -> StepResult:
        """Wait until the last stage has sampled, and send the sampled tokens to all ranks."""
        result = self._group.next_result(step.number)
        self._group.check_results()
        if result is None:
            self._abandon(step)
            assert step.result is not None
            return step.result
        for number, sequence in enumerate(step.sequences):
            if sequence.failure is not None:  # the last stage knows only what has failed there
                result.chunks[number] = ChunkResult.of_failure(sequence.failure)
        tokens = result.new_tokens()
        for sequence, new in zip(step.sequences, tokens, strict=True):
            sequence.token_ids += new
        self._group.send(Sampled(tokens))
        return result

    def _abandon(self, step: PipelinedStep) -> None:
        """Abandon ``step``, in which a rank ran out of memory, and all later steps."""
        if step.result is None:
            self._group.abandon_steps(step.number)
        for pending in [step, *self._pending]:
            if pending.number >= step.number:
                pending.result = StepResult(out_of_memory=True)
