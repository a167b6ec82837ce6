"""What an executor keeps of the running sequences: their tokens and page tables, updated by each batch. ExecutorPart: a
feature that has a part in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aiakq.kernels.ops.sampling import SampleRow
from aiakq.runtime.executor.grid_positions import grid_positions
from aiakq.runtime.executor.logits_modifier import LogitsModifier, Modifier
from aiakq.runtime.executor.output_reader import OutputReader, new_logprobs_reader
from aiakq.runtime.executor.row_transforms import RowMask
from aiakq.runtime.models.interface import InputRows
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import LogitsProcessor
from aiakq.runtime.protocol.step import Chunk, NewSequence, StepBatch


class SequenceState:
    """A running sequence.

    token_ids  prompt, then the tokens of collected steps.
    pages      its KV pages in order.
    modifier   of its logits.
    masks      of the tokens that may follow ``token_ids``.
    reader     of the model's output; None: it is only sampled.
    asked      of each of its rows of logits; None until the first is sampled.
    failure    why nothing it computes counts; None: it does.
    grids      positions of its tokens; None: they are their numbers.
    state_at   by StateRows, the number of tokens that each of its states is the state after.
    """

    __slots__ = (
        *(
            "asked",
            "drafted",
            "failure",
            "grids",
            "masks",
            "modifier",
            "num_drafted",
            "num_prompt",
            "pages",
            "reader",
            "sampling",
        ),
        *("slot", "spec", "state_at", "token_ids"),
    )

    def __init__(self, record: NewSequence, logits_processors: Sequence[LogitsProcessor] = ()) -> None:
        spec: RequestSpec = record.spec
        self.slot = record.slot
        self.spec = spec
        self.sampling = spec.sampling
        self.token_ids = spec.prompt_token_ids + record.output_token_ids
        self.num_prompt = len(spec.prompt_token_ids)
        self.pages: list[int] = []
        self.state_at: dict[object, list[int]] = {}
        self.modifier: Modifier = LogitsModifier(spec, logits_processors)
        self.masks: tuple[RowMask, ...] = ()
        self.reader: OutputReader | None = new_logprobs_reader(spec)
        self.asked: SampleRow | None = None
        self.num_drafted: int | None = None
        self.drafted: list[int] = []
        self.failure: str | None = None
        self.grids = grid_positions(spec.media) if spec.media else None


class ExecutorPart(Protocol):
    """A feature's part in an executor, with its own state; ``build.features`` says which features there are."""

    def handlers(self) -> Mapping[type, Callable[[Any], Any]]:
        """Return functions by the type of the command or preparation that they apply, see ``CommandHandlers``."""

    def start(self, sequence: SequenceState) -> None:
        """A sequence starts to run: set what the feature changes of it, such as its masks, or why it fails."""


@runtime_checkable
class RowPart(ExecutorPart, Protocol):
    """A part that needs to know which rows of a step belong to which sequence."""

    def assign(self, sequences: list[SequenceState], starts: list[int], logit_rows: list[range]) -> None:
        """The rows of the next step have been chosen.

        starts      of the tokens of each sequence, and their end.
        logit_rows  rows of the logits of each sequence.
        """


@runtime_checkable
class InputPart(ExecutorPart, Protocol):
    """A part that replaces embeddings of tokens, in the executor of the first stage, or adds to outputs of layers."""

    def input_rows(
        self, chunks: Sequence[Chunk], sequences: Sequence[SequenceState], starts: list[int]
    ) -> InputRows | None:
        """Return what the next step reads in place of embeddings of its tokens, or adds to outputs of layers; None if
        there is nothing.

        starts  row of the first token of each chunk.
        """


class RunningSequences:
    """The running sequences by slot, and one page table for all.

    page_table  [slots, max pages] int32 on the host; row s holds the pages of slot s, padded with page 0.
    parts       features that have a part in sequences.
    """

    def __init__(self, num_slots: int, max_pages: int, parts: Sequence[ExecutorPart] = ()) -> None:
        self.page_table = np.zeros((num_slots, max_pages), np.int32)
        self._parts = parts
        self._states: dict[int, SequenceState] = {}

    def update(self, batch: StepBatch, processors: Mapping[str, Sequence[LogitsProcessor]]) -> list[SequenceState]:
        """Free slots, add sequences and append pages as ``batch`` says; returns the sequence of each chunk, ``decodes``
        first.

        ``processors`` are logits processors by request id.
        """
        for slot in batch.freed_slots:
            state = self._states.pop(slot)
            self.page_table[slot, : len(state.pages)] = 0
        for record in batch.new_sequences:
            assert record.slot not in self._states, f"slot {record.slot} is in use"
            state = SequenceState(record, processors.get(record.spec.request_id, ()))
            for part in self._parts:
                part.start(state)
            self._states[record.slot] = state
        states, decodes = self._states, batch.decodes
        for slot, pages in decodes.new_pages.items():
            self._append_pages(slot, pages)
        for chunk in batch.chunks:
            if chunk.new_pages:
                self._append_pages(chunk.slot, chunk.new_pages)
        decoding = [states[slot] for slot in decodes.slots]
        return decoding + [states[chunk.slot] for chunk in batch.chunks]

    def rows(self, slots: list[int], width: int) -> Tensor:
        """The first ``width`` pages of each of ``slots``: [len(slots), width] int32, possibly a view."""
        first, end = slots[0], slots[0] + len(slots)
        if len(slots) == 1 or slots == list(range(first, end)):
            return torch.from_numpy(self.page_table[first:end, :width])
        return torch.from_numpy(self.page_table[slots, :width])

    def places(self, slots: list[int], positions: NDArray[np.int64], page_size: int) -> NDArray[np.int64]:
        """Where keys and values of one position each of ``slots`` are stored: page * page_size + offset."""
        pages = positions // page_size
        return (self.page_table[slots, pages].astype(np.int64) - pages) * page_size + positions

    def clear(self) -> None:
        """Free every slot."""
        self._states.clear()
        self.page_table.fill(0)

    def _append_pages(self, slot: int, pages: list[int]) -> None:
        known = self._states[slot].pages
        start = len(known)
        known += pages
        self.page_table[slot, start : len(known)] = pages
