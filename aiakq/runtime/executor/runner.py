"""Runner: owns a model and its KV cache, and builds the input tensors of a step. It keeps no sequences."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aiakq.kernels.ops.attention import as_bytes
from aiakq.kernels.recurrent_types import States
from aiakq.kernels.transfer import on_device
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.config.compilation import CompilationConfig
from aiakq.runtime.executor.captured import CapturedStep, capture_step
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.executor.output_reader import sampled_positions
from aiakq.runtime.executor.sequences import ExecutorPart, RowPart, RunningSequences, SequenceState
from aiakq.runtime.executor.states import StateRows
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import Model, ModelInput, StageOutput
from aiakq.runtime.protocol.step import Chunk


@dataclass
class StepInput:
    """The model input of a step.

    logit_rows  rows of the logits that belong to each chunk.
    unknown     (index in token_ids, sequence) of tokens that the host does not know yet, for which 0 is a placeholder.
    columns     host copies of the integers in ``model_input``.
    page_table  host copy of the page table; a view that is valid until the next batch.
    """

    model_input: ModelInput
    logit_rows: list[range]
    unknown: list[tuple[int, SequenceState]]
    columns: list[NDArray[np.int64]]
    page_table: Tensor

    def digest(self) -> int:
        """Return a checksum of the inputs and page table, equal on ranks that run the same step.

        Tokens that the host does not know yet are not covered.
        """
        value = zlib.crc32(self.page_table.contiguous().numpy().tobytes())
        for column in self.columns:
            value = zlib.crc32(column.tobytes(), value)
        return value


class Runner:
    """A model and its KV cache.

    captured    captured step that replaces ``model.forward`` where it accepts the input; None without one.
    states      allocation of state rows, if the model has recurrent layers.
    parts       features that have a part in the executor of this model.
    shift       offset between a token and the position at which the model reads it: 1 for EAGLE-3 heads.
    """

    shift = 0

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        device: torch.device,
        states: StateRows | None = None,
        parts: Sequence[ExecutorPart] = (),
    ) -> None:
        self.model = model
        self.page_size = page_size
        self.device = device
        self.states = states
        self.parts = parts
        self._row_parts = [part for part in parts if isinstance(part, RowPart)]
        self.caches = model.new_caches(num_pages, page_size, 1 if states is None else states.num_rows)
        self.captured: CapturedStep | None = None

    def capture(self, bounds: Bounds, options: CompilationConfig) -> str:
        """Capture the steps of the model up to ``bounds``, if possible.

        Returns a description of how steps run, for the start-up table.
        """
        self.captured, how = capture_step(self.model, self.caches, bounds, self.page_size, options)
        return how

    def forward(self, step: ModelInput) -> Tensor | StageOutput:
        """Run a step: write keys and values into the KV cache, and return logits or hidden states.

        Returns logits [R, V] float32 of ``step.logit_rows``, or the input of the next stage. The next call may
        overwrite the result.
        """
        if self.captured is not None and self.captured.accepts(step):
            return self.captured(step)
        return self.model.forward(step, self.caches)

    def hidden_like(self, step: ModelInput) -> Tensor:
        """Return an uninitialized tensor [T, hidden] with the shape and dtype of the hidden states of ``step``."""
        model = self.model
        assert isinstance(model, Decoder), "only native models have stages"
        width = model.config.hidden_size
        return torch.empty(len(step.token_ids), width, dtype=model.ops.dtype, device=self.device)

    def clear(self, pages: list[int]) -> None:
        """Zero the keys and values in ``pages`` in every layer.

        Recurrent states need no clearing, because they are written completely before they are read.
        """
        for cache in self.caches:
            if isinstance(cache, States):
                continue
            for tensor in cache:
                as_bytes(tensor)[pages] = 0

    def prepare(self, chunks: list[Chunk], sequences: list[SequenceState], running: RunningSequences) -> StepInput:
        """Build the model input for ``chunks`` of ``sequences``, whose page tables are in ``running``."""
        token_ids, unknown = self._token_ids(chunks, sequences)
        counts = [chunk.count for chunk in chunks]
        starts = [0, *itertools.accumulate(counts)]
        lengths = [chunk.first + chunk.count for chunk in chunks]
        rows_of, logit_rows = _logit_rows(chunks, sequences, starts)
        for part in self._row_parts:
            part.assign(sequences, starts, rows_of)
        slots = [chunk.slot for chunk in chunks]
        # Of each token: the position, and the slot of the KV cache.
        if starts[-1] == len(chunks):
            positions, slot_of = np.array(lengths) - 1, np.array(slots)
        else:
            positions = np.repeat(np.array(lengths) - starts[1:], counts) + np.arange(starts[-1])
            slot_of = np.repeat(slots, counts)
        pages = running.page_table[slot_of, positions // self.page_size]
        kv_slots = pages.astype(np.int64) * self.page_size + positions % self.page_size
        multiple = self.model.row_multiple
        columns = [
            _padded(np.array(column, np.int64), multiple) for column in (token_ids, positions, kv_slots, logit_rows)
        ]
        token_column, position_column, slot_column, row_column = self._columns(columns)
        bounds = [np.array(starts), np.array(lengths)]
        query_start, kv_len = self._columns(bounds, np.int32)
        page_table = running.rows(slots, -(-max(lengths) // self.page_size))
        context = AttentionContext(
            query_start=query_start,
            kv_len=kv_len,
            slots=slot_column,
            page_table=on_device(page_table, self.device),
            num_decodes=counts.count(1),
            query_start_list=starts,
            kv_len_list=lengths,
            states=None if self.states is None else self.states.context(chunks, sequences),
        )
        model_input = ModelInput(token_column, position_column, context, row_column)
        return StepInput(model_input, rows_of, unknown, [*columns, *bounds], page_table)

    def _token_ids(
        self, chunks: list[Chunk], sequences: list[SequenceState]
    ) -> tuple[list[int], list[tuple[int, SequenceState]]]:
        """Return the tokens of the step, and what ``StepInput`` has as ``unknown``."""
        token_ids: list[int] = []
        unknown: list[tuple[int, SequenceState]] = []
        shift = self.shift
        for chunk, sequence in zip(chunks, sequences, strict=True):
            first, end = chunk.first + shift, len(token_ids) + chunk.count
            if chunk.count == 1 and first < len(sequence.token_ids):
                token_ids.append(sequence.token_ids[first])
                continue
            token_ids += sequence.token_ids[first : first + chunk.count]
            token_ids += chunk.drafts
            if len(token_ids) < end:
                unknown.append((len(token_ids), sequence))
                token_ids.append(0)
        return token_ids, unknown

    def _columns(self, columns: Sequence[NDArray[np.int64]], dtype: type[np.signedinteger] = np.int64) -> list[Tensor]:
        """Convert each array [N] to a tensor of ``dtype``, with one copy to the device for all of them."""
        # Aligned to 16 bytes: Triton recompiles kernels for pointers with a different alignment.
        multiple = 16 // np.dtype(dtype).itemsize
        starts = [0, *itertools.accumulate(len(column) + -len(column) % multiple for column in columns)]
        packed = np.zeros(starts[-1], dtype)
        for start, column in zip(starts[:-1], columns, strict=True):
            packed[start : start + len(column)] = column
        on_target = on_device(torch.from_numpy(packed), self.device)
        return [on_target[start : start + len(column)] for start, column in zip(starts[:-1], columns, strict=True)]


def _logit_rows(
    chunks: list[Chunk], sequences: list[SequenceState], starts: list[int]
) -> tuple[list[range], list[int]]:
    """Return the rows of the logits of each chunk, and which token of the step each row belongs to."""
    rows_of: list[range] = []
    logit_rows: list[int] = []
    for chunk, sequence, start in zip(chunks, sequences, starts[:-1], strict=True):
        before = len(logit_rows)
        if chunk.count == 1 and chunk.samples and sequence.reader is None:
            logit_rows.append(start)
        else:
            reader = sequence.reader
            needed = sampled_positions(chunk) if reader is None else reader.positions(chunk)
            logit_rows += [start + position - chunk.first for position in needed]
        rows_of.append(range(before, len(logit_rows)))
    return rows_of, logit_rows


def _padded(column: NDArray[np.int64], multiple: int) -> NDArray[np.int64]:
    """Append zeros to ``column`` [N] up to a multiple of ``multiple``."""
    padding = -len(column) % multiple
    return np.concatenate([column, np.zeros(padding, np.int64)]) if padding else column
