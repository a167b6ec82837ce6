"""Sampling in the native library, without sorting or copying the vocabulary; see src/sampling_kernel.cpp."""

from __future__ import annotations

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


class NativeSampler:
    """Native sampler; see Sampler. Every row considers all candidates."""

    def __init__(self) -> None:
        # Reused between steps: megabytes for a large vocabulary.
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._dtype = np.dtype(library.load_library().structs["SampleRow"])
        self._op = library.new_op("sample")
        self._ops = library.OpList(self._op)
        #: The rows of the last call and their parameters in a table: most steps have the rows of the step before.
        self._last: tuple[list[SampleRow], NDArray[np.void]] = [], np.zeros(0, self._dtype)

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
        table = self._table(rows)
        table["raw"] = table["logits"] = raw.data_ptr() + raw.stride(0) * 4 * np.arange(len(rows))
        if len(uniforms):
            table["uniform"] = uniforms
        if modified is not None:
            modified = modified._replace(logits=modified.logits.contiguous())
            table["logits"][modified.rows] = _addresses(modified.logits)
        if masks is not None:
            masks = masks._replace(bits=masks.bits.contiguous())
            table["mask"][masks.rows] = _addresses(masks.bits)
        counts = table["count"]
        total = int(counts.sum())
        top_ids, top_values = np.empty(total, np.int32), np.empty(total, np.float32)
        if total:
            before = counts.cumsum() - counts
            table["top_ids"] = top_ids.ctypes.data + 4 * before
            table["top_values"] = top_values.ctypes.data + 4 * before
        self._run(table, raw.shape[1])
        return NativePendingSamples(_results(table, top_ids, top_values))

    def _table(self, rows: Sequence[SampleRow]) -> NDArray[np.void]:
        """Return a table [R] of the native library's structure, with the parameters of ``rows``."""
        last, table = self._last
        if last != rows:
            table = np.zeros(len(rows), self._dtype)
            temperature, top_k, top_p, min_p, token, num_logprobs, _ = zip(*rows, strict=True)
            table["temperature"], table["top_p"], table["min_p"], table["given"] = temperature, top_p, min_p, token
            table["top_k"] = np.clip(top_k, 0, 2**31 - 1)
            table["ranked"] = [count is not None for count in num_logprobs]
            table["count"] = [count or 0 for count in num_logprobs]
            self._last = list(rows), table
        return table.copy()

    def _run(self, table: NDArray[np.void], vocab: int) -> None:
        threads = torch.get_num_threads() if len(table) * vocab * 4 >= SHARED_FROM else 1
        threads = min(threads, len(table))
        needed = threads * (-(-vocab // 8) * 8 * 16 + 1024)
        with self._ops.lock:
            if self._scratch.numel() < needed:
                self._scratch = library.allocate_scratch(needed)
            op = self._op
            op.m, op.vocabulary, op.rows = len(table), vocab, table.ctypes.data
            op.scratch = self._scratch.data_ptr()
            self._ops(threads)


def _addresses(tensor: Tensor) -> NDArray[np.int64]:
    """Return the address of each row of a contiguous tensor [N, W] of 4-byte elements."""
    return tensor.data_ptr() + 4 * tensor.shape[1] * np.arange(len(tensor))


def _results(table: NDArray[np.void], top_ids: NDArray[np.int32], top_values: NDArray[np.float32]) -> SampleResults:
    results = SampleResults(table["token"].tolist(), table["log_probability"].tolist(), {}, {}, {})
    finite, nothing_left = np.isfinite(table["normalizer"]), table["nothing_left"]
    if not finite.all() or nothing_left.any():
        results.failed.update(dict.fromkeys(np.flatnonzero(nothing_left).tolist(), SampleOutcome.NOTHING_LEFT))
        results.failed.update(dict.fromkeys(np.flatnonzero(~finite).tolist(), SampleOutcome.NOT_FINITE))
    ranked = np.flatnonzero(table["ranked"]).tolist()
    if ranked:
        results.ranks.update(zip(ranked, table["rank"][ranked].tolist(), strict=True))
        ids, values, at = top_ids.tolist(), top_values.tolist(), 0
        for row, count in zip(ranked, table["count"][ranked].tolist(), strict=True):
            if count:
                results.top[row] = TopTokens(ids[at : at + count], values[at : at + count])
                at += count
    return results
