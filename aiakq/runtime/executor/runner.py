"""Runner: owns a model and its KV cache, and builds the input tensors of a step. It keeps no sequences."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aiakq.kernels.ops.attention import as_bytes
from aiakq.kernels.recurrent_types import paged_tensors
from aiakq.kernels.transfer import on_device
from aiakq.kernels.types import AttentionContext
from aiakq.runtime.config.compilation import CompilationConfig
from aiakq.runtime.executor.captured import CapturedStep, capture_step
from aiakq.runtime.executor.cpu_program import Bounds
from aiakq.runtime.executor.output_reader import sampled_positions
from aiakq.runtime.executor.sequences import ExecutorPart, InputPart, RowPart, RunningSequences, SequenceState
from aiakq.runtime.executor.states import StateRows
from aiakq.runtime.models.decoder import Decoder
from aiakq.runtime.models.interface import Model, ModelInput, StageOutput
from aiakq.runtime.protocol.media import whole_runs
from aiakq.runtime.protocol.step import NO_DECODES, Chunk, Decodes


@dataclass
class StepInput:
    """The model input of a step.

    logit_rows  rows of the logits that belong to each chunk; those of ``decodes`` are the first.
    unknown     indices in token_ids, ascending, of tokens that the host does not know yet; 0 is a placeholder.
    unknown_sequences  the sequences of these tokens.
    numbers     host copies of the integers in ``model_input``.
    page_table  host copy of the page table; a view that is valid until the next batch.
    """

    model_input: ModelInput
    logit_rows: list[range]
    unknown: list[int]
    unknown_sequences: list[SequenceState]
    numbers: list[NDArray[Any]]
    page_table: Tensor

    def digest(self) -> int:
        """Return a checksum of the inputs and page table, equal on ranks that run the same step.

        Tokens that the host does not know yet are not covered.
        """
        value = zlib.crc32(self.page_table.contiguous().numpy().tobytes())
        for each in self.numbers:
            value = zlib.crc32(each.tobytes(), value)
        return value


@dataclass
class StepColumns:
    """What a step is built of: see ``StepInput``, ``ModelInput`` and ``AttentionContext``.

    num_decodes  the number of sequences in ``decoded``.
    decoded      columns of ``Decodes``, of one element per sequence: token_ids, positions, slots, lengths.

    grids        arrays [N, 3] of ``ModelInput.grid_positions``, of tokens of chunks.

    The lists are of chunks, which come behind them; ``unknown`` is of both.
    """

    num_decodes: int = 0
    decoded: tuple[Any, Any, Any, Any] = ((), (), (), ())
    unknown: list[int] = field(default_factory=list)
    unknown_sequences: list[SequenceState] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    rows_of: list[range] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    grids: list[NDArray[np.int64]] = field(default_factory=list)


class Runner:
    """A model and its KV cache.

    captured    captured step that replaces ``model.forward`` where it accepts the input; None without one.
    states      allocation of state rows, if the model has recurrent layers.
    parts       features that have a part in the executor of this model.
    short_start see ``Model``.
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
        self._input_parts = [part for part in parts if isinstance(part, InputPart)]
        self.caches = model.new_caches(num_pages, page_size, 1 if states is None else states.num_rows)
        self.captured: CapturedStep | None = None
        self.short_start = model.short_start
        self._grid_rotary = model.grid_rotary if isinstance(model, Decoder) else None

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
        if step.grid_positions is not None:
            assert self._grid_rotary is not None
            self._grid_rotary.write(step.grid_positions)
        plain = not step.input_rows and step.context.row_ends is None
        if self.captured is not None and plain and self.captured.accepts(step):
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
        rows = on_device(pages, self.device)
        for cache in self.caches:
            for tensor in paged_tensors(cache):
                as_bytes(tensor)[rows] = 0

    def prepare(
        self,
        chunks: list[Chunk],
        sequences: list[SequenceState],
        running: RunningSequences,
        decodes: Decodes = NO_DECODES,
    ) -> StepInput:
        """Build the model input for ``decodes`` and ``chunks`` of ``sequences``, whose pages are in ``running``."""
        num_decodes = len(decodes.slots)
        columns = self._decoded(decodes, sequences[:num_decodes], running) if num_decodes else StepColumns()
        self._append(columns, chunks, sequences[num_decodes:])
        starts = [*range(num_decodes + 1), *columns.starts]
        for part in self._row_parts:
            part.assign(sequences, starts, [range(row, row + 1) for row in range(num_decodes)] + columns.rows_of)
        token_ids, positions, slots, lengths = columns.decoded
        multiple = self.model.row_multiple
        padding = [0] * (-starts[-1] % multiple)
        row_padding = [0] * (-(num_decodes + len(columns.logit_rows)) % multiple)
        numbers, (token_column, position_column, slot_column, row_column) = self._columns(
            (token_ids, columns.token_ids + padding),
            (positions, columns.positions + padding),
            (slots, columns.slots + padding),
            (np.arange(num_decodes), columns.logit_rows + row_padding),
        )
        first_starts = np.arange(num_decodes + 1)
        ends, (query_start, kv_len) = self._columns(
            (first_starts, columns.starts), (lengths, columns.lengths), dtype=np.int32
        )
        kv_len_list: list[int] = np.asarray(lengths).tolist() + columns.lengths
        num_pages = -(-max(kv_len_list) // self.page_size)
        page_table = running.rows(decodes.slots + [chunk.slot for chunk in chunks], num_pages)
        context = AttentionContext(
            query_start=query_start,
            kv_len=kv_len,
            slots=slot_column,
            page_table=on_device(page_table, self.device),
            num_decodes=num_decodes + sum(chunk.count == 1 for chunk in chunks),
            query_start_list=starts,
            kv_len_list=kv_len_list,
            states=None if self.states is None else self.states.context(decodes.chunks() + chunks, sequences),
            row_ends=self._row_ends(chunks, sequences[num_decodes:], starts, kv_len_list) if chunks else None,
        )
        model_input = ModelInput(token_column, position_column, context, row_column)
        if columns.grids:
            model_input.grid_positions = on_device(torch.from_numpy(np.concatenate(columns.grids)), self.device)
        if self._input_parts:
            found = [
                part.input_rows(chunks, sequences[num_decodes:], starts[num_decodes:]) for part in self._input_parts
            ]
            model_input.input_rows = [rows for rows in found if rows is not None]
        on_host = [numbers, ends, *columns.grids]
        return StepInput(model_input, columns.rows_of, columns.unknown, columns.unknown_sequences, on_host, page_table)

    def _row_ends(
        self, chunks: list[Chunk], sequences: list[SequenceState], starts: list[int], lengths: list[int]
    ) -> Tensor | None:
        """Return ``AttentionContext.row_ends`` of a step whose last sequences are ``sequences``; None if no chunk has
        tokens that attend to each other in both directions.
        """
        ends: NDArray[Any] | None = None
        own = starts[len(starts) - 1 - len(chunks) :]
        for chunk, sequence, start in zip(chunks, sequences, own, strict=False):
            if not sequence.spec.media:
                continue
            stop = chunk.first + chunk.count
            for first, count in whole_runs(sequence.spec.media, chunk.first, stop):
                assert first + count <= stop, "a step ends within an image whose tokens attend to each other"
                if ends is None:
                    counts = np.diff(starts)
                    ends = np.arange(1, starts[-1] + 1) + np.repeat(np.array(lengths) - starts[1:], counts)
                ends[start + max(0, first - chunk.first) : start + first + count - chunk.first] = first + count
        return None if ends is None else on_device(torch.from_numpy(ends.astype(np.int32)), self.device)

    def _decoded(self, decodes: Decodes, sequences: list[SequenceState], running: RunningSequences) -> StepColumns:
        """Return the columns of ``decodes``."""
        firsts = np.array(decodes.firsts)
        token_ids, unknown = self._decoded_tokens(decodes.firsts, sequences)
        unknown_sequences = sequences if len(unknown) == len(sequences) else [sequences[row] for row in unknown]
        slots = running.places(decodes.slots, firsts, self.page_size)
        positions = firsts
        if self.short_start:
            positions = firsts + [self.short_start if sequence.spec.is_short else 0 for sequence in sequences]
        elif self._grid_rotary is not None:
            positions = firsts + [0 if sequence.grids is None else sequence.grids.shift for sequence in sequences]
        columns = (token_ids, positions, slots, firsts + 1)
        return StepColumns(len(sequences), columns, unknown, unknown_sequences)

    def _append(self, columns: StepColumns, chunks: list[Chunk], sequences: list[SequenceState]) -> None:
        """Append the columns of ``chunks``."""
        token_ids, positions, slots, logit_rows = (
            columns.token_ids,
            columns.positions,
            columns.slots,
            columns.logit_rows,
        )
        unknown, unknown_sequences = columns.unknown, columns.unknown_sequences
        P, shift, short_start, num_decodes = self.page_size, self.shift, self.short_start, columns.num_decodes
        for chunk, sequence in zip(chunks, sequences, strict=True):
            first, count, own = chunk.first, chunk.count, len(token_ids)
            start, row = num_decodes + own, num_decodes + len(logit_rows)
            known, pages, reader, grids = sequence.token_ids, sequence.pages, sequence.reader, sequence.grids
            begin = first + short_start if sequence.spec.is_short else first
            if count == 1 and chunk.samples and reader is None and not chunk.drafts and grids is None:
                # Most chunks, in fewer operations than those below.
                if first + shift < len(known):
                    token_ids.append(known[first + shift])
                else:
                    unknown.append(start)
                    unknown_sequences.append(sequence)
                    token_ids.append(0)
                positions.append(begin)
                slots.append(pages[first // P] * P + first % P)
                logit_rows.append(start)
            else:
                end = first + count
                token_ids += known[first + shift : end + shift]
                token_ids += chunk.drafts
                if len(token_ids) < own + count:
                    unknown.append(num_decodes + len(token_ids))
                    unknown_sequences.append(sequence)
                    token_ids.append(0)
                if grids is None:
                    positions += range(begin, begin + count)
                else:
                    assert self._grid_rotary is not None
                    grids.append(first, end, positions, columns.grids, self._grid_rotary.first)
                slots += [pages[position // P] * P + position % P for position in range(first, end)]
                needed = sampled_positions(chunk) if reader is None else reader.positions(chunk)
                logit_rows += [start + position - first for position in needed]
            columns.rows_of.append(range(row, num_decodes + len(logit_rows)))
            columns.starts.append(start + count)
            columns.lengths.append(first + count)

    def _decoded_tokens(
        self, firsts: list[int], sequences: list[SequenceState]
    ) -> tuple[list[int] | NDArray[np.int64], list[int]]:
        """Return the token with number ``firsts[i]`` of each ``sequences[i]``, and which the host does not know."""
        known = [sequence.token_ids for sequence in sequences]
        firsts = [first + self.shift for first in firsts] if self.shift else firsts
        if list(map(len, known)) == firsts:  # as in most steps that are submitted behind another
            return np.zeros(len(known), np.int64), list(range(len(known)))
        pairs = list(zip(firsts, known, strict=True))
        unknown = [row for row, (first, tokens) in enumerate(pairs) if first >= len(tokens)]
        return [tokens[first] if first < len(tokens) else 0 for first, tokens in pairs], unknown

    def _columns(
        self, *columns: tuple[Sequence[int] | NDArray[np.int64], list[int]], dtype: Any = np.int64
    ) -> tuple[NDArray[Any], list[Tensor]]:
        """Join the two parts of each column, with one copy to the device for all of them.

        Returns all numbers on the host, which nothing changes, and the tensors.
        """
        # Aligned to 16 bytes: Triton recompiles kernels for pointers with a different alignment.
        multiple = 16 // np.dtype(dtype).itemsize
        sizes = [len(first) + len(second) for first, second in columns]
        starts = [0, *itertools.accumulate(-(-size // multiple) * multiple for size in sizes)]
        numbers = np.zeros(starts[-1], dtype)
        for start, size, (first, second) in zip(starts, sizes, columns, strict=False):
            numbers[start : start + len(first)] = first
            numbers[start + len(first) : start + size] = second
        packed = on_device(torch.from_numpy(numbers), self.device)
        tensors = [packed[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        # On a CPU the tensors are the same memory, and unknown tokens will be written there.
        return numbers.copy(), tensors
