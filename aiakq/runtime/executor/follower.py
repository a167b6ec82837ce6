"""Follower: carries out, on a rank other than 0, the steps of rank 0. It samples nothing and decides nothing."""

from __future__ import annotations

import zlib
from collections import deque

import torch

from aiakq.errors import error
from aiakq.kernels.cpu.gather import NativeCollective
from aiakq.runtime.device_memory import is_out_of_memory, release_memory
from aiakq.runtime.distributed.messages import (
    Abandon,
    Abandoned,
    Batch,
    Launch,
    OutOfMemory,
    ResetSequences,
    Sampled,
    ToRank,
)
from aiakq.runtime.engine.records import StepBatch
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sequences import RunningSequences, SequenceState
from aiakq.runtime.models.decoder import ModelInput


class Follower:
    """A runner that does what messages of rank 0 say. Its sequences are those of rank 0's executor."""

    def __init__(self, runner: Runner, collective: NativeCollective, num_slots: int, max_pages: int) -> None:
        self._runner, self._collective = runner, collective
        self._sequences = RunningSequences(num_slots, max_pages)
        self._batch: StepBatch | None = None
        self._own: list[SequenceState] = []  # of the last batch
        self._computed: deque[list[SequenceState]] = deque()  # of steps that were not collected

    @torch.inference_mode()
    def apply(self, message: ToRank) -> Abandoned | OutOfMemory | None:
        """Do what ``message`` says; the answer, if there is one. Raises ``rank_failed`` for a step that is not that of
        rank 0.
        """
        if isinstance(message, Batch):
            self._batch = message.batch
            self._own = self._sequences.update(message.batch, {})
            if message.batch.cleared_pages:
                self._runner.clear(message.batch.cleared_pages)
        elif isinstance(message, Launch):
            return self._compute(message)
        elif isinstance(message, Abandon):
            if self._computed and self._computed[-1] is self._own:
                self._computed.pop()
            self._collective.start_over()
            return Abandoned()
        elif isinstance(message, Sampled):
            for sequence, token in zip(self._computed.popleft(), message.tokens, strict=True):
                if token is not None:
                    sequence.token_ids.append(token)
        elif isinstance(message, ResetSequences):
            self._computed.clear()
            self._sequences.clear()
        return None

    def _compute(self, message: Launch) -> OutOfMemory | None:
        assert self._batch is not None
        self._computed.append(self._own)
        try:
            step = self._runner.prepare(self._batch.chunks, self._own, self._sequences)
            token_ids = step.model_input.token_ids
            for (place, _), token in zip(step.unknown, message.unknown_tokens, strict=True):
                token_ids[place] = token
            if digest(step.model_input) != message.digest:
                rank = self._collective.rank
                raise error("rank_failed", rank=rank, reason="its step is not that of rank 0, which is a bug")
            self._runner.forward(step.model_input)
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
        else:
            return None
        release_memory()
        self._collective.interrupt()
        return OutOfMemory()


def digest(step: ModelInput) -> int:
    """Equal for ranks that compute the same step over the same pages."""
    context = step.context
    value = 0
    for part in (step.token_ids, step.positions, step.logit_rows, context.slots, context.kv_len, context.page_table):
        value = zlib.crc32(part.numpy().tobytes(), value)
    return value
