"""Follower: executes the messages of rank 0 on another rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.runtime.device_memory import is_out_of_memory, release_memory
from aiakq.runtime.distributed.collectives import RankCollective, is_lost
from aiakq.runtime.distributed.links import LinkReceiver, LinkSender
from aiakq.runtime.distributed.messages import (
    Abandon,
    Abandoned,
    Batch,
    Launch,
    OutOfMemory,
    Prepare,
    Results,
    Resume,
    Resumed,
    Sampled,
    ToRank,
)
from aiakq.runtime.distributed.rank_group import NO_MEMORY
from aiakq.runtime.executor.commands import CommandHandlers
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sampled_step import SampledStep
from aiakq.runtime.executor.sequences import RunningSequences, SequenceState
from aiakq.runtime.models.interface import StageOutput
from aiakq.runtime.protocol.command import ExecutorCommand, ResetSequences
from aiakq.runtime.protocol.step import StepBatch, StepResult

#: Seconds to leave to rank 0 for finding out which rank failed, before this rank reports a failed collective.
_SECONDS_FOR_CAUSE = 1.0


class Stages:
    """A rank's links to the neighboring pipeline stages.

    link_in   link from the previous stage; None in the first stage.
    link_out  link to the next stage; None in the last stage.
    samples   whether this rank samples, as the first rank of the last of several stages does.
    wait      blocks until ``link_in`` is readable and returns True, or returns False if the step is abandoned.
    """

    def __init__(
        self,
        link_in: LinkReceiver | None = None,
        link_out: LinkSender | None = None,
        samples: bool = False,
        wait: Callable[[], bool] = bool,
    ) -> None:
        self.link_in, self.link_out, self.samples, self.wait = link_in, link_out, samples, wait

    def start_over(self) -> None:
        """Start a new epoch on the links: messages of abandoned steps are skipped from now on."""
        for link in (self.link_in, self.link_out):
            if link is not None:
                link.epoch += 1


Reply = Abandoned | Resumed | OutOfMemory | Results


class Follower:
    """A runner controlled by the messages of rank 0, with a copy of the sequences of rank 0's executor.

    rank        global rank.
    collective  collective of its stage; None if the stage has one rank.
    """

    def __init__(
        self,
        runner: Runner,
        rank: int,
        collective: RankCollective | None,
        stages: Stages,
        num_slots: int,
        max_pages: int,
    ) -> None:
        self._runner, self._rank, self._collective, self._stages = runner, rank, collective, stages
        self._sequences = RunningSequences(num_slots, max_pages, runner.parts)
        self._batch: StepBatch | None = None
        self._batch_sequences: list[SequenceState] = []  # sequences of the last batch
        self._computed: deque[tuple[int, list[SequenceState]]] = deque()  # steps whose tokens have not arrived
        self._handlers = CommandHandlers({ResetSequences: self._reset}, runner.parts)
        self._is_blocked = False  # since a step ran out of memory, until it is abandoned

    @property
    def has_pending_steps(self) -> bool:
        """Whether a launched step is unfinished."""
        return bool(self._computed)

    @torch.inference_mode()
    def apply(self, message: ToRank) -> Reply | None:
        """Execute a message; return the reply, or None.

        Raises ``rank_failed`` if a step differs from that of rank 0.
        """
        if isinstance(message, Batch):
            self._batch = message.batch
            self._apply_commands(message.batch.commands)
            self._batch_sequences = self._sequences.update(message.batch, {})
            if message.batch.cleared_pages:
                self._runner.clear(message.batch.cleared_pages)
        elif isinstance(message, Launch):
            self._computed.append((message.number, self._batch_sequences))
            return None if self._is_blocked else self._compute(message)
        elif isinstance(message, Abandon):
            return self._abandon(message.number)
        elif isinstance(message, Resume):
            if self._collective is not None and self._collective.rank == 0:
                self._collective.start_over()  # after the other ranks of the stage
            return Resumed()
        elif isinstance(message, Sampled):
            _, sequences = self._computed.popleft()
            if not self._stages.samples:
                for sequence, new in zip(sequences, message.tokens, strict=True):
                    sequence.token_ids += new
        elif isinstance(message, Prepare):
            self._handlers.prepare(message.preparation)
        return None

    def _reset(self, command: ResetSequences) -> None:
        self._computed.clear()
        self._sequences.clear()

    def _apply_commands(self, commands: list[ExecutorCommand]) -> None:
        """Raises ``rank_failed`` if this rank fails to apply a command that rank 0 has applied."""
        for before, after in zip(commands, self._handlers.apply(commands), strict=True):
            if after != before:
                raise error("rank_failed", rank=self._rank, reason=str(after))

    def _abandon(self, number: int) -> Abandoned:
        """Drop the steps from ``number`` on."""
        while self._computed and self._computed[-1][0] >= number:
            self._computed.pop()
        self._is_blocked = False
        self._stages.start_over()
        if self._collective is not None:
            self._collective.interrupt()  # a rank of the stage may be waiting in a collective
            if self._collective.rank != 0:
                self._collective.start_over()
        return Abandoned()

    def _compute(self, message: Launch) -> Reply | None:
        assert self._batch is not None
        try:
            return self._run(message, self._batch)
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
        # Outside the except clause, because the traceback keeps tensors alive.
        if self._collective is not None and not self._collective.can_start_over:
            raise error("rank_failed", rank=self._rank, reason=NO_MEMORY)
        self._is_blocked = True
        if self._collective is not None:
            self._collective.interrupt()  # first, because other ranks wait for this one
        release_memory()
        return OutOfMemory(message.number)

    def _run(self, message: Launch, batch: StepBatch) -> Results | None:
        """Run the step; return its results on the rank that samples."""
        step = self._runner.prepare(batch.chunks, self._batch_sequences, self._sequences, batch.decodes)
        model_input = step.model_input
        if step.digest() != message.digest:
            raise error("rank_failed", rank=self._rank, reason="its inputs differ from rank 0's, which is a bug")
        if step.unknown and self._collective is not None and self._collective.can_broadcast:
            self._collective.broadcast(model_input.token_ids)
        else:
            for index, token in zip(step.unknown, message.unknown_tokens, strict=True):
                model_input.token_ids[index] = token
        stages = self._stages
        if stages.link_in is not None:
            like = self._runner.hidden_like(model_input)
            model_input.hidden = stages.link_in.receive(message.number, like, stages.wait)
            if model_input.hidden is None:
                return None
        output = self._runner.forward(model_input)
        if self._collective is not None:
            self._collective.watch_step()
            if self._collective.is_given_up:
                self._check_lost(self._collective)
                return None  # the output is invalid; rank 0 decides what follows
        if isinstance(output, StageOutput):
            assert stages.link_out is not None
            stages.link_out.send(message.number, output, lambda: not is_lost(self._collective))
        elif stages.samples:
            results = Results(message.number, self._sample(batch, output, step.logit_rows))
            if not is_lost(self._collective):
                return results
            assert self._collective is not None
            self._check_lost(self._collective)
        return None

    def _check_lost(self, collective: RankCollective) -> None:
        """Raise ``rank_failed`` if the group cannot continue, unless the cause is a rank that timed out."""
        if not collective.can_start_over and collective.late_rank is None:
            time.sleep(_SECONDS_FOR_CAUSE)
            raise error(
                "rank_failed",
                rank=self._rank,
                reason=collective.failure or "it lost its connections to the other ranks",
            )

    def _sample(self, batch: StepBatch, logits: Tensor, rows: list[range]) -> StepResult:
        sampled = SampledStep(batch.chunks, self._batch_sequences, batch.decodes)
        sampled.take_logits(logits, rows)
        sampled.launch_sampler(self._runner.model.sampler)
        return sampled.results()
