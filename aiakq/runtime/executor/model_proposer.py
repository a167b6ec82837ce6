"""ModelProposer: what proposes draft tokens with a model on the device, in the executor, behind every step."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sequences import RunningSequences, SequenceState
from aiakq.runtime.models.interface import ModelInput
from aiakq.runtime.protocol.step import Chunk, ChunkResult


class ModelProposer(Protocol):
    """Draft tokens for the sequences of an executor.

    runner  of its model, whose pages have the numbers of those of the target model.
    """

    runner: Runner

    def observe(self, step: ModelInput) -> Tensor | None:
        """What is kept for ``propose`` of a step that was just launched: [T, ...], or None."""

    def forget_pages(self) -> None:
        """Pages may have been written without this model: forget which of them hold its keys."""

    def propose(
        self,
        chunks: list[Chunk],
        sequences: list[SequenceState],
        results: list[ChunkResult],
        running: RunningSequences,
        observed: Tensor | None,
    ) -> None:
        """Behind a step with ``results``: compute what later draft tokens need, and fill in ``proposed`` of the results
        of chunks that ask for it. observed [T, ...] is what ``observe`` kept.
        """
