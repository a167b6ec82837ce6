"""Follower: carries out, on a rank other than 0, the steps of rank 0. It decides nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from aiakq.errors import error
from aiakq.runtime.device_memory import is_out_of_memory, release_memory
from aiakq.runtime.distributed.collectives import RankCollective
from aiakq.runtime.distributed.links import LinkReceiver, LinkSender
from aiakq.runtime.distributed.messages import (
    Abandon,
    Abandoned,
    Batch,
    Launch,
    OutOfMemory,
    PrepareGrammar,
    ResetSequences,
    Results,
    Resume,
    Resumed,
    Sampled,
    ToRank,
    UseVocabulary,
)
from aiakq.runtime.engine.records import StepBatch, StepResult
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sampled_step import SampledStep
from aiakq.runtime.executor.sequences import RunningSequences, SequenceState
from aiakq.runtime.models.decoder import StageOutput
from aiakq.runtime.structured.compiler import GrammarCompiler

#: Seconds in which rank 0 notices the end of another rank, which is what this one then suffers from.
_SECONDS_FOR_CAUSE = 1.0
#: Why ranks end that cannot abandon a step.
NO_MEMORY = "it has not enough memory for a step that others have begun"


class Stages:
    """A follower's place among the stages.

    link_in   from the stage before; None in the first one.
    link_out  to the stage after; None in the last one.
    samples   whether it samples: the first rank of the last of several stages does.
    wait      returns True when ``link_in`` can be read, False if the step is abandoned first.
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
        """Send and expect nothing any more of the steps so far."""
        for link in (self.link_in, self.link_out):
            if link is not None:
                link.epoch += 1


Answer = Abandoned | Resumed | OutOfMemory | Results


class Follower:
    """A runner that does what messages of rank 0 say. Its sequences are those of rank 0's executor.

    collective  of the ranks of its stage; None: it is alone in it.
    rank        its number among all ranks.
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
        self._sequences = RunningSequences(num_slots, max_pages, runner.projection)
        self._batch: StepBatch | None = None
        self._own: list[SequenceState] = []  # of the last batch
        self._computed: deque[tuple[int, list[SequenceState]]] = deque()  # steps that were not collected
        self._is_blocked = False  # since a step that did not fit

    @property
    def has_pending_steps(self) -> bool:
        """Whether rank 0 waits for a step."""
        return bool(self._computed)

    @torch.inference_mode()
    def apply(self, message: ToRank) -> Answer | None:
        """Do what ``message`` says; the answer, if there is one. Raises ``rank_failed`` for a step that is not that of
        rank 0.
        """
        if isinstance(message, Batch):
            self._batch = message.batch
            if message.batch.freed_adapters or message.batch.new_adapters:
                self._change_adapters(message.batch)
            self._own = self._sequences.update(message.batch, {}, self._runner.adapters)
            if message.batch.cleared_pages:
                self._runner.clear(message.batch.cleared_pages)
        elif isinstance(message, Launch):
            self._computed.append((message.number, self._own))
            return None if self._is_blocked else self._compute(message)
        elif isinstance(message, Abandon):
            return self._abandon(message.number)
        elif isinstance(message, Resume):
            if self._collective is not None and self._collective.rank == 0:
                self._collective.start_over()  # the others of its stage have
            return Resumed()
        elif isinstance(message, Sampled):
            _, sequences = self._computed.popleft()
            if not self._stages.samples:
                for sequence, new in zip(sequences, message.tokens, strict=True):
                    sequence.token_ids += new
        elif isinstance(message, UseVocabulary):
            if self._stages.samples:
                self._sequences.compiler = GrammarCompiler(message.vocabulary)
        elif isinstance(message, PrepareGrammar):
            if self._sequences.compiler is not None:
                self._sequences.compiler.prepare(message.grammar)
        elif isinstance(message, ResetSequences):
            self._computed.clear()
            self._sequences.clear()
        return None

    def _change_adapters(self, batch: StepBatch) -> None:
        """Raise ``rank_failed`` for an adapter that rank 0 has loaded and this rank cannot."""
        changed = self._runner.change_adapters(batch)
        for before, after in zip(batch.new_adapters, changed.new_adapters, strict=True):
            if after.error != before.error:
                raise error("rank_failed", rank=self._rank, reason=f"adapter {after.adapter.name}: {after.error}")

    def _abandon(self, number: int) -> Abandoned:
        """Forget the steps from ``number`` on."""
        while self._computed and self._computed[-1][0] >= number:
            self._computed.pop()
        self._is_blocked = False
        self._stages.start_over()
        if self._collective is not None:
            self._collective.interrupt()  # a rank of the same stage may wait for this one
            if self._collective.rank != 0:
                self._collective.start_over()
        return Abandoned()

    def _compute(self, message: Launch) -> Answer | None:
        assert self._batch is not None
        try:
            return self._run(message, self._batch)
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
        # Outside the except clause: the traceback held tensors.
        if self._collective is not None and not self._collective.can_start_over:
            raise error("rank_failed", rank=self._rank, reason=NO_MEMORY)
        self._is_blocked = True
        if self._collective is not None:
            self._collective.interrupt()  # first: others wait for this rank
        release_memory()
        return OutOfMemory(message.number)

    def _run(self, message: Launch, batch: StepBatch) -> Results | None:
        """Compute the step; in the last stage, the results."""
        step = self._runner.prepare(batch.chunks, self._own, self._sequences)
        model_input = step.model_input
        if step.digest() != message.digest:
            raise error("rank_failed", rank=self._rank, reason="its step is not that of rank 0, which is a bug")
        if step.unknown and self._collective is not None and self._collective.can_broadcast:
            self._collective.broadcast(model_input.token_ids)
        else:
            for (place, _), token in zip(step.unknown, message.unknown_tokens, strict=True):
                model_input.token_ids[place] = token
        stages = self._stages
        if stages.link_in is not None:
            like = self._runner.hidden_like(model_input)
            model_input.hidden = stages.link_in.receive(message.number, like, stages.wait)
            if model_input.hidden is None:
                return None
        found = self._runner.forward(model_input)
        if self._collective is not None:
            self._collective.watch_step()
            if self._collective.is_given_up:
                self._check_lost(self._collective)
                return None  # not to be used; rank 0 says what comes next
        if isinstance(found, StageOutput):
            assert stages.link_out is not None
            stages.link_out.send(message.number, found)
        elif stages.samples:
            return Results(message.number, self._sample(batch, found, step.logit_rows))
        return None

    def _check_lost(self, collective: RankCollective) -> None:
        """Raise ``rank_failed`` if the ranks cannot meet again, for a reason that is not that one is late."""
        if not collective.can_start_over and collective.late_rank is None:
            time.sleep(_SECONDS_FOR_CAUSE)
            raise error("rank_failed", rank=self._rank, reason=collective.failure or "it has lost the others")

    def _sample(self, batch: StepBatch, logits: Tensor, rows: list[range]) -> StepResult:
        sampled = SampledStep(batch.chunks, self._own)
        sampled.take_logits(logits, rows)
        sampled.launch_sampler(self._runner.model.sampler)
        return sampled.results()
