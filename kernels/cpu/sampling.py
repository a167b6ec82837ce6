"""Sampling in the native library, without sorting or copying the vocabulary; see src/sampling_kernel.cpp."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import Array, Structure
from functools import cached_property

import torch
from torch import Tensor

from aiakq.kernels.cpu import library
from aiakq.kernels.ops.sampling import ModifiedLogits, SampleOutcome, SampleResult, SampleRow, TokenMasks
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

    def __init__(self, results: list[SampleResult]) -> None:
        self._results = results

    @cached_property
    def tokens(self) -> Tensor:
        """[R] int64; see PendingSamples."""
        return torch.tensor([result.token for result in self._results])

    def collect(self) -> list[SampleResult]:
        """See PendingSamples."""
        return self._results


class NativeSampler:
    """Native sampler; see Sampler. Every row considers all candidates."""

    def __init__(self) -> None:
        # Reused between steps: megabytes for a large vocabulary.
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._struct = library.load_library().structs["SampleRow"]
        self._op = library.new_op("sample")
        self._ops = library.OpList(self._op)

    def __call__(
        self,
        raw: Tensor,
        rows: Sequence[SampleRow],
        modified: ModifiedLogits | None = None,
        masks: TokenMasks | None = None,
    ) -> NativePendingSamples:
        """See Sampler."""
        vocab = raw.shape[1]
        if raw.stride(1) != 1:
            raw = raw.contiguous()
        table = (self._struct * len(rows))()
        address, stride = raw.data_ptr(), raw.stride(0) * 4
        for native, row in zip(table, rows, strict=True):
            native.logits = native.raw = address
            address += stride
            native.given = row.token
            if row.temperature:
                native.temperature, native.uniform = row.temperature, row.uniform
                native.top_k, native.top_p, native.min_p = max(row.top_k, 0), row.top_p, row.min_p
            if row.num_logprobs is not None:
                native.ranked, native.count = 1, row.num_logprobs
        if modified is not None:
            modified = modified._replace(logits=modified.logits.contiguous())
            for index, at in enumerate(modified.rows):
                table[at].logits = modified.logits.data_ptr() + index * vocab * 4
        if masks is not None:
            masks = masks._replace(bits=masks.bits.contiguous())
            address, stride = masks.bits.data_ptr(), masks.bits.shape[1] * 4
            for at in masks.rows:
                table[at].mask = address
                address += stride
        top = _top_buffers(table) if any(row.num_logprobs for row in rows) else None
        self._run(table, vocab)
        return NativePendingSamples(_results(table, top))

    def _run(self, table: Array[Structure], vocab: int) -> None:
        threads = torch.get_num_threads() if len(table) * vocab * 4 >= SHARED_FROM else 1
        threads = min(threads, len(table))
        needed = threads * (-(-vocab // 8) * 8 * 16 + 1024)
        with self._ops.lock:
            if self._scratch.numel() < needed:
                self._scratch = library.allocate_scratch(needed)
            op = self._op
            op.m, op.vocabulary, op.rows = len(table), vocab, ctypes.addressof(table)
            op.scratch = self._scratch.data_ptr()
            self._ops(threads)


def _top_buffers(table: Array[Structure]) -> tuple[Tensor, Tensor]:
    """Allocate memory for the most likely tokens of all rows, concatenated: ids [N] int32 and log-probabilities [N]
    float32, where N is the sum of the rows' ``count``.
    """
    total = sum(native.count for native in table)
    ids, values = torch.empty(total, dtype=torch.int32), torch.empty(total, dtype=torch.float32)
    at = 0
    for native in table:
        if native.count:
            native.top_ids, native.top_values = ids.data_ptr() + 4 * at, values.data_ptr() + 4 * at
            at += native.count
    return ids, values


def _results(table: Array[Structure], top: tuple[Tensor, Tensor] | None) -> list[SampleResult]:
    results = []
    ids, values = ([], []) if top is None else (top[0].tolist(), top[1].tolist())
    at = 0
    for native in table:
        outcome = SampleOutcome.NOTHING_LEFT if native.nothing_left else SampleOutcome.DONE
        if not math.isfinite(native.normalizer):
            outcome = SampleOutcome.NOT_FINITE
        end = at + native.count
        top_tokens = ids[at:end], values[at:end]
        results.append(SampleResult(native.token, native.log_probability, outcome, native.rank, *top_tokens))
        at = end
    return results
