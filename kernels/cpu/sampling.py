"""Sampling in the native library, without sorting or copying the vocabulary; see src/sampling_kernel.cpp."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.ops.sampling import ModifiedLogits, SampleOutcome, SampleResults, SampleRow, TokenMasks, TopTokens
from aiakq.kernels.types import SamplingProblem

#: Minimum size of all rows of logits, in bytes, for sampling with several threads.
SHARED_FROM = 1 << 17


def supports(problem: SamplingProblem) -> str | None:
    """Return None, or why not."""
    return None if problem.dtype == torch.float32 else f"logits are float32, not {problem.dtype}"


def prepare(problem: SamplingProblem) -> NativeSampler:
    """Return a sampler with its own scratch memory."""
    return NativeSampler()


class NativePendingSamples:
    """Results that are already available; see PendingSamples."""

    def __init__(self, results: SampleResults) -> None:
        self._results = results

    @cached_property
    def tokens(self) -> Tensor:
        """[R] int64; see PendingSamples."""
        return torch.tensor(self._results.tokens)

    def collect(self) -> SampleResults:
        """See PendingSamples."""
        return self._results


class RowTable:
    """R rows as the native library reads them. It is kept, because most steps have the rows of the step before.

    columns    name of a field of the library's structure -> [R], which the table holds.
    address    of the table.
    ranked     rows whose tokens get a rank.
    first_top  [R] where the most likely tokens of each row begin among those of all rows.
    """

    def __init__(self, rows: list[SampleRow]) -> None:
        table = np.zeros(len(rows), np.dtype(library.load_library().structs["SampleRow"]))
        assert table.dtype.names is not None
        self.rows, self.address = rows, table.ctypes.data
        columns = self.columns = {name: table[name] for name in table.dtype.names}
        temperature, top_k, top_p, min_p, token, counts, _ = zip(*rows, strict=True)
        columns["temperature"][:], columns["top_p"][:], columns["min_p"][:] = temperature, top_p, min_p
        columns["top_k"][:], columns["given"][:] = np.clip(top_k, 0, 2**31 - 1), token
        self.ranked = [row for row, count in enumerate(counts) if count is not None]
        columns["ranked"][self.ranked] = 1
        columns["count"][:] = [count or 0 for count in counts]
        self.first_top = columns["count"].cumsum() - columns["count"]
        total = int(columns["count"].sum())
        self._top_ids, self._top_values = np.zeros(total, np.int32), np.zeros(total, np.float32)
        columns["top_ids"][:] = self._top_ids.ctypes.data + 4 * self.first_top
        columns["top_values"][:] = self._top_values.ctypes.data + 4 * self.first_top
        self._numbers = np.arange(len(rows))
        self._place: tuple[int, int] | None = None  # of the logits that all rows have

    def set_logits(self, raw: Tensor, modified: ModifiedLogits | None, masks: TokenMasks | None) -> None:
        """Set the addresses of ``raw`` [R, V], whose rows are contiguous, of ``modified`` and of ``masks``."""
        columns, place = self.columns, (raw.data_ptr(), raw.stride(0))
        if place != self._place:
            columns["raw"][:] = place[0] + 4 * place[1] * self._numbers
            columns["logits"][:] = columns["raw"]
            columns["mask"].fill(0)
        self._place = place if modified is None and masks is None else None
        if modified is not None:
            columns["logits"][modified.rows] = _addresses(modified.logits)
        if masks is not None:
            columns["mask"][masks.rows] = _addresses(masks.bits)

    def results(self) -> SampleResults:
        """Return what the library wrote."""
        columns = self.columns
        results = SampleResults(columns["token"].tolist(), columns["log_probability"].tolist(), {}, {}, {})
        normalizers, nothing_left = columns["normalizer"].tolist(), columns["nothing_left"].tolist()
        if any(nothing_left) or not math.isfinite(sum(normalizers)):
            for row, (normalizer, is_empty) in enumerate(zip(normalizers, nothing_left, strict=True)):
                if not math.isfinite(normalizer):
                    results.failed[row] = SampleOutcome.NOT_FINITE
                elif is_empty:
                    results.failed[row] = SampleOutcome.NOTHING_LEFT
        if self.ranked:
            results.ranks.update(zip(self.ranked, columns["rank"][self.ranked].tolist(), strict=True))
        if len(self._top_ids):
            ids, values, first = self._top_ids.tolist(), self._top_values.tolist(), self.first_top.tolist()
            for row in self.ranked:
                top = slice(first[row], first[row] + (self.rows[row].num_logprobs or 0))
                if ids[top]:
                    results.top[row] = TopTokens(ids[top], values[top])
        return results


class NativeSampler:
    """Native sampler; see Sampler. Every row considers all candidates."""

    def __init__(self) -> None:
        # Reused between steps: megabytes for a large vocabulary.
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._op = library.new_op("sample")
        self._ops = library.OpList(self._op)
        self._table: RowTable | None = None

    def __call__(
        self,
        raw: Tensor,
        rows: Sequence[SampleRow],
        uniforms: Sequence[float] = (),
        modified: ModifiedLogits | None = None,
        masks: TokenMasks | None = None,
    ) -> NativePendingSamples:
        """See Sampler."""
        if raw.stride(1) != 1:
            raw = raw.contiguous()
        if modified is not None:
            modified = modified._replace(logits=modified.logits.contiguous())
        if masks is not None:
            masks = masks._replace(bits=masks.bits.contiguous())
        with self._ops.lock:
            table = self._table
            if table is None or table.rows != rows:
                table = self._table = RowTable(list(rows))
            table.set_logits(raw, modified, masks)
            if len(uniforms):
                table.columns["uniform"][:] = uniforms
            self._run(table, raw.shape[1])
            return NativePendingSamples(table.results())

    def _run(self, table: RowTable, vocab: int) -> None:
        count = len(table.rows)
        threads = torch.get_num_threads() if count * vocab * 4 >= SHARED_FROM else 1
        threads = min(threads, count)
        needed = threads * (-(-vocab // 8) * 8 * 16 + 1024)
        if self._scratch.numel() < needed:
            self._scratch = library.allocate_scratch(needed)
        op = self._op
        op.m, op.vocabulary, op.rows = count, vocab, table.address
        op.scratch = self._scratch.data_ptr()
        self._ops(threads)


def _addresses(tensor: Tensor) -> NDArray[np.int64]:
    """Return the address of each row of a contiguous tensor [N, W] of 4-byte elements."""
    return tensor.data_ptr() + 4 * tensor.shape[1] * np.arange(len(tensor))
