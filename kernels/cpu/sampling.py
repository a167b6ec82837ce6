"""Sampling in the native library, without sorting or copying the vocabulary; see src/sampling_kernel.cpp."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.ops.penalizing import RowPenalties
from aiakq.kernels.ops.sampling import (
    ModifiedLogits,
    SampleOutcome,
    SampleResults,
    SampleRow,
    TokenMasks,
    TopTokens,
)
from aiakq.kernels.types import SamplingProblem

#: Minimum size of all rows of logits, in bytes, for sampling with several threads.
SHARED_FROM = 1 << 17
#: Rows of a new table.
_FIRST_ROWS = 16
#: Room for tokens that will occur in a sequence with penalties: at least, and as a share of those that have.
_SPARE, _SPARE_SHARE = 32, 0.25


def supports(problem: SamplingProblem) -> str | None:
    """Return None, or why not."""
    return None if problem.dtype == torch.float32 else f"logits are float32, not {problem.dtype}"


def prepare(problem: SamplingProblem) -> NativeSampler:
    """Return a sampler with its own scratch memory."""
    return NativeSampler()


class NativePendingSamples:
    """Results that are already available; see PendingSamples."""

    def __init__(self, results: SampleResults, tokens: NDArray[np.int64]) -> None:
        self._results, self._tokens = results, tokens

    @cached_property
    def tokens(self) -> Tensor:
        """[R] int64; see PendingSamples."""
        return torch.from_numpy(self._tokens)

    def collect(self) -> SampleResults:
        """See PendingSamples."""
        return self._results


class NativePenalties:
    """See CountedPenalties. The library appends to the tokens and counts, [capacity] each.

    address  of the library's structure.
    """

    def __init__(
        self, token_ids: Sequence[int], num_prompt: int, repetition: float, frequency: float, presence: float
    ) -> None:
        counts = Counter(dict.fromkeys(token_ids[:num_prompt], 0) if repetition != 1 else ())
        counts.update(token_ids[num_prompt:])
        self._struct = library.load_library().structs["TokenPenalties"]()
        self.address = ctypes.addressof(self._struct)
        self._struct.size, self._struct.length = len(counts), len(token_ids)
        self._struct.repetition, self._struct.frequency, self._struct.presence = repetition, frequency, presence
        self._tokens = np.fromiter(counts.keys(), np.int32, len(counts))
        self._counts = np.fromiter(counts.values(), np.float32, len(counts))
        self.make_room()

    @property
    def room(self) -> int:
        """How many more tokens may occur before there must be more room."""
        return len(self._tokens) - int(self._struct.size)

    def make_room(self) -> None:
        """Allocate room for more tokens."""
        more = max(_SPARE, int(self._struct.size * _SPARE_SHARE)) - self.room
        self._tokens = np.concatenate([self._tokens, np.zeros(more, np.int32)])
        self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
        self._struct.tokens, self._struct.counts = self._tokens.ctypes.data, self._counts.ctypes.data

    def count(self, token_ids: Sequence[int]) -> None:
        """See CountedPenalties."""
        struct = self._struct
        for token in token_ids[struct.length :]:
            found = (self._tokens[: struct.size] == token).nonzero()[0]
            if len(found):
                self._counts[found[0]] += 1
            else:
                if not self.room:
                    self.make_room()
                self._tokens[struct.size], self._counts[struct.size] = token, 1
                struct.size += 1
            struct.length += 1


class RowTable:
    """R rows as the native library reads them. Most are those of the step before, and are not written again.

    columns    name of a field of the library's structure -> [R], which the table holds.
    address    of the table.
    ranked     rows whose tokens get a rank.
    first_top  [R] where the most likely tokens of each row begin among those of all rows.
    """

    def __init__(self) -> None:
        self.rows: list[SampleRow] = []
        self._allocate(_FIRST_ROWS)

    def _allocate(self, capacity: int) -> None:
        self._table = np.zeros(capacity, np.dtype(library.load_library().structs["SampleRow"]))
        self.address = self._table.ctypes.data
        self._numbers = np.arange(capacity)
        self._place: tuple[int, int] | None = None  # of the logits that all rows have
        self._penalties: RowPenalties | None = None
        self._own: list[NativePenalties] = []  # of them, which stay in memory
        self._room = 0  # for tokens that occur in each of these rows
        self.set_rows([])

    def set_rows(self, rows: list[SampleRow]) -> None:
        """Make ``rows`` those of the table."""
        before, count = self.rows, len(rows)
        if count > len(self._table):
            self.rows = before = []
            self._allocate(2 * count)
        changed = [
            row for row, one in enumerate(rows) if row >= len(before) or (one is not before[row] and one != before[row])
        ]
        self.rows = rows
        assert self._table.dtype.names is not None
        columns = self.columns = {name: self._table[name][:count] for name in self._table.dtype.names}
        if changed:
            temperature, top_k, top_p, min_p, token, counts, _ = zip(*[rows[row] for row in changed], strict=True)
            columns["temperature"][changed], columns["top_p"][changed] = temperature, top_p
            columns["min_p"][changed], columns["given"][changed] = min_p, token
            columns["top_k"][changed] = np.clip(top_k, 0, 2**31 - 1)
            columns["ranked"][changed] = [each is not None for each in counts]
            columns["count"][changed] = [each or 0 for each in counts]
        self.ranked: list[int] = columns["ranked"].nonzero()[0].tolist()
        self.first_top = columns["count"].cumsum() - columns["count"]
        total = int(columns["count"].sum())
        self._top_ids, self._top_values = np.zeros(total, np.int32), np.zeros(total, np.float32)
        columns["top_ids"][:] = self._top_ids.ctypes.data + 4 * self.first_top
        columns["top_values"][:] = self._top_values.ctypes.data + 4 * self.first_top

    def set_logits(self, raw: Tensor, modified: ModifiedLogits | None, masks: TokenMasks | None) -> None:
        """Set the addresses of ``raw`` [R, V], whose rows are contiguous, of ``modified`` and of ``masks``."""
        columns, place = self.columns, (raw.data_ptr(), raw.stride(0))
        if place != self._place:
            table = self._table
            table["raw"][:] = place[0] + 4 * place[1] * self._numbers
            table["logits"][:] = table["raw"]
            table["mask"].fill(0)
        self._place = place if modified is None and masks is None else None
        if modified is not None:
            columns["logits"][modified.rows] = _addresses(modified.logits)
        if masks is not None:
            columns["mask"][masks.rows] = _addresses(masks.bits)

    def set_penalties(self, penalties: RowPenalties | None) -> None:
        """Set the addresses of ``penalties``, and the tokens that are counted."""
        before, self._penalties = self._penalties, penalties
        if penalties is None:
            if before is not None:
                self._table["penalties"].fill(0)
            return
        rows = penalties.rows
        if before is None or before.rows is not rows or before.penalties is not penalties.penalties:
            self._own = [each for each in penalties.penalties if isinstance(each, NativePenalties)]
            assert len(self._own) == len(rows), "the penalties are those of another sampler"
            self._table["penalties"].fill(0)
            self._table["penalties"][rows] = [each.address for each in self._own]
            self._room = 0
        if not self._room:
            for each in self._own:
                if not each.room:
                    each.make_room()
            self._room = min(each.room for each in self._own)
        self._room -= 1
        self._table["length"][rows], self._table["last"][rows] = penalties.lengths, penalties.last

    def results(self) -> NativePendingSamples:
        """Return what the library wrote."""
        columns = self.columns
        tokens, normalizers = columns["token"].astype(np.int64), columns["normalizer"]
        results = SampleResults(tokens.tolist(), columns["log_probability"].tolist(), {}, {}, {})
        is_empty, is_finite = columns["nothing_left"] != 0, np.isfinite(normalizers)
        if is_empty.any() or not is_finite.all():
            for row in (is_empty | ~is_finite).nonzero()[0].tolist():
                results.failed[row] = SampleOutcome.NOTHING_LEFT if is_finite[row] else SampleOutcome.NOT_FINITE
        if self.ranked:
            results.ranks.update(zip(self.ranked, columns["rank"][self.ranked].tolist(), strict=True))
        if len(self._top_ids):
            ids, values, first = self._top_ids.tolist(), self._top_values.tolist(), self.first_top.tolist()
            top = results.top
            for row in self.ranked:
                begin = first[row]
                end = begin + (self.rows[row].num_logprobs or 0)
                if end > begin:
                    top[row] = TopTokens(ids[begin:end], values[begin:end])
        return NativePendingSamples(results, tokens)


class NativeSampler:
    """Native sampler; see PenalizingSampler. Every row considers all candidates."""

    def __init__(self) -> None:
        # Reused between steps: megabytes for a large vocabulary.
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._op = library.new_op("sample")
        self._ops = library.OpList(self._op)
        self._table = RowTable()

    def new_penalties(
        self, token_ids: Sequence[int], num_prompt: int, repetition: float, frequency: float, presence: float
    ) -> NativePenalties:
        """See PenalizingSampler."""
        return NativePenalties(token_ids, num_prompt, repetition, frequency, presence)

    def __call__(
        self,
        raw: Tensor,
        rows: Sequence[SampleRow],
        uniforms: Sequence[float] | NDArray[np.float64] = (),
        modified: ModifiedLogits | None = None,
        masks: TokenMasks | None = None,
        penalties: RowPenalties | None = None,
    ) -> NativePendingSamples:
        """See PenalizingSampler."""
        if raw.stride(1) != 1:
            raw = raw.contiguous()
        if modified is not None:
            modified = modified._replace(logits=modified.logits.contiguous())
        if masks is not None:
            masks = masks._replace(bits=masks.bits.contiguous())
        with self._ops.lock:
            table = self._table
            if table.rows != rows:
                table.set_rows(list(rows))
            table.set_logits(raw, modified, masks)
            table.set_penalties(penalties)
            if len(uniforms):
                table.columns["uniform"][:] = uniforms
            self._run(table, raw.shape[1])
            return table.results()

    def _run(self, table: RowTable, vocab: int) -> None:
        count = len(table.rows)
        threads = torch.get_num_threads() if count * vocab * 4 >= SHARED_FROM else 1
        threads = min(threads, count)
        needed = threads * (-(-vocab // 16) * 16 * 20 + 2048)
        if self._scratch.numel() < needed:
            self._scratch = library.allocate_scratch(needed)
        op = self._op
        op.m, op.vocabulary, op.rows = count, vocab, table.address
        op.scratch = self._scratch.data_ptr()
        self._ops(threads)


def _addresses(tensor: Tensor) -> NDArray[np.int64]:
    """Return the address of each row of a contiguous tensor [N, W] of 4-byte elements."""
    return tensor.data_ptr() + 4 * tensor.shape[1] * np.arange(len(tensor))
