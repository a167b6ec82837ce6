"""LocalExecutor: the model in the calling process, on one device.

At most two steps are in flight. The model of the next step is launched behind the one before, with its sampled tokens
taken from the device; the sampler of the next step is launched when the results of the one before have been collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from aiakq.runtime.device_memory import is_out_of_memory, release_memory
from aiakq.runtime.engine.executor import CommandsDone, PendingStep
from aiakq.runtime.executor.commands import CommandHandlers, Handler
from aiakq.runtime.executor.model_proposer import ModelProposer
from aiakq.runtime.executor.runner import Runner, StepInput
from aiakq.runtime.executor.sampled_step import DecodeRows, SampledStep
from aiakq.runtime.executor.sequences import RunningSequences, SequenceState
from aiakq.runtime.models.interface import whole_logits
from aiakq.runtime.protocol.command import EnableDrafts, Preparation, ResetSequences
from aiakq.runtime.protocol.sampling_params import LogitsProcessor
from aiakq.runtime.protocol.step import StepBatch, StepResult


class LocalPendingStep(SampledStep):
    """A step whose model was launched, and whose sampler was too if ``is_sampled``.

    out_of_memory  neither runs.
    proposer       of draft tokens to follow it, if that is switched on when it is launched.
    observed       what the proposer keeps of the model's step.
    """

    def __init__(self, executor: LocalExecutor, batch: StepBatch, sequences: list[SequenceState]) -> None:
        super().__init__(batch.chunks, sequences, batch.decodes, executor.decode_rows)
        self.out_of_memory = False
        self.proposer = executor.active_proposer
        self.observed: Tensor | None = None
        self._executor = executor

    def collect(self) -> StepResult:
        """See ``PendingStep``."""
        return self._executor.collect(self)

    def fill_unknown(self, step: StepInput, previous: LocalPendingStep | None) -> None:
        """Complete ``step``, on the device: tokens that the host does not know are those that ``previous`` samples."""
        if step.unknown:
            assert previous is not None
            previous.copy_tokens(step.unknown, step.unknown_sequences, step.model_input.token_ids)

    def launch_model(self, runner: Runner, step: StepInput) -> None:
        """Launch the model over ``step``."""
        self.take_logits(whole_logits(runner.forward(step.model_input)), step.logit_rows)


class LocalExecutor:
    """An ``Executor`` over a ``Runner``.

    num_slots  slots are numbered below this.
    max_pages  most pages of one sequence.
    proposer   of draft tokens; None: only masks propose any.
    active_proposer  it, or None while draft tokens are switched off.
    decode_rows  of the sequences that decoded last.
    """

    def __init__(self, runner: Runner, num_slots: int, max_pages: int, proposer: ModelProposer | None = None) -> None:
        self.runner = runner
        self.proposer = proposer
        self.active_proposer = proposer
        self._sampler = runner.model.sampler
        self._sequences = RunningSequences(num_slots, max_pages, runner.parts)
        self._pending: deque[LocalPendingStep] = deque()
        self._processors: dict[str, Sequence[LogitsProcessor]] = {}
        self.decode_rows = DecodeRows()

    @property
    def _handlers(self) -> CommandHandlers:
        # Not kept: in a cycle with its own methods, the executor, and with it other ranks' processes, would live on.
        own: dict[type, Handler] = {ResetSequences: self._reset, EnableDrafts: self._enable_drafts}
        return CommandHandlers(own, self.runner.parts)

    @torch.inference_mode()
    def submit(self, batch: StepBatch) -> PendingStep:
        """See ``Executor``."""
        if batch.commands:
            batch = replace(batch, commands=self._handlers.apply(batch.commands))
        # A proposer reads the chunks of a step one by one.
        batch = batch if self.proposer is None else batch.expanded()
        return self._submit(batch) if batch.num_chunks else CommandsDone()

    def _submit(self, batch: StepBatch) -> LocalPendingStep:
        """Launch a step whose commands have been applied."""
        sequences = self._sequences.update(batch, self._processors)
        if batch.cleared_pages:
            self.runner.clear(batch.cleared_pages)
            if self.proposer is not None:
                self.proposer.runner.clear(batch.cleared_pages)
        previous = self._pending[-1] if self._pending else None
        step = LocalPendingStep(self, batch, sequences)
        self._pending.append(step)
        if previous is not None and previous.out_of_memory:
            step.out_of_memory = True
            return step
        assert previous is None or previous.is_sampled, "two steps at most may be pending"

        step.out_of_memory = not fits(lambda: self._compute(step, previous))
        return step

    def _compute(self, step: LocalPendingStep, previous: LocalPendingStep | None) -> None:
        """Launch the model over the chunks of ``step`` and, behind no other step, the sampler."""
        step_input = self.runner.prepare(step.chunks, step.sequences, self._sequences, step.decodes)
        step.fill_unknown(step_input, previous)
        self._launch_model(step, step_input)
        if previous is None:
            step.launch_sampler(self._sampler)

    def _launch_model(self, step: LocalPendingStep, step_input: StepInput) -> None:
        step.launch_model(self.runner, step_input)
        if step.proposer is not None:
            step.observed = step.proposer.observe(step_input.model_input)

    @torch.inference_mode()
    def collect(self, step: LocalPendingStep) -> StepResult:
        """The results of the oldest pending step; launches the sampler of the next."""
        oldest = self._pending.popleft()
        assert oldest is step, "steps are collected in order"
        if step.out_of_memory:
            return StepResult(out_of_memory=True)
        result = step.results()
        if (proposer := step.proposer) is not None:
            # Without memory for it there are no draft tokens.
            fits(lambda: proposer.propose(step.chunks, step.sequences, result.chunks, self._sequences, step.observed))
        if self._pending and not self._pending[0].out_of_memory:
            following = self._pending[0]
            following.out_of_memory = not fits(lambda: following.launch_sampler(self._sampler))
        return result

    def prepare(self, preparation: Preparation) -> Future[Any] | None:
        """See ``Executor``."""
        return self._handlers.prepare(preparation)

    def _reset(self, command: ResetSequences) -> None:
        self._pending.clear()
        self._sequences.clear()

    def _enable_drafts(self, command: EnableDrafts) -> None:
        if self.proposer is not None and command.enabled and self.active_proposer is None:
            self.proposer.forget_pages()
        self.active_proposer = self.proposer if command.enabled else None

    def register_logits_processors(self, request_id: str, processors: Sequence[LogitsProcessor]) -> None:
        """Apply ``processors`` to the logits of a request that is about to be added to the engine.

        Functions are no records, so only an executor in the calling process can have them; no other has this method.
        """
        self._processors[request_id] = processors

    def unregister_logits_processors(self, request_id: str) -> None:
        """Forget the processors of a request that has ended, if it had any."""
        self._processors.pop(request_id, None)


def fits(call: Callable[[], None]) -> bool:
    """Run ``call``; False, and all unused memory is released, if there was not enough."""
    try:
        call()
        return True
    except Exception as failure:
        if not is_out_of_memory(failure):
            raise
    # Outside the except clause: the traceback held tensors.
    release_memory()
    return False
