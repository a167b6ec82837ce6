"""Sampling the rows of a step: penalties, biases and masks, then the sampling operation of the device.

A row is a position of a sequence whose next token is sampled. Randomness is stateless: the uniform number of a token is
a hash of its sequence's seed and its position. So a request repeats itself whatever else is in the batch, and after a
preemption, without the state of a generator.

Everything is launched without waiting for the device until the results are collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aiakq.kernels.ops.penalizing import PenalizingSampler
from aiakq.kernels.ops.sampling import (
    ModifiedLogits,
    PendingSamples,
    SampleOutcome,
    Sampler,
    SampleResults,
    SampleRow,
    TokenMasks,
    TopTokens,
)
from aiakq.kernels.transfer import on_device
from aiakq.runtime.executor.penalties import CountedRows, Penalties, PenaltyTable, penalize
from aiakq.runtime.executor.row_transforms import RowMask
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import NOT_FINITE, NOTHING_LEFT, SampledToken, TokenLogprobs

_NO_TOKENS = TopTokens([], [])


class SamplerRow:
    """One row of logits whose token is sampled.

    drafts     draft tokens between the tokens of ``sequence`` and this one.
    masks      of the sequence, behind ``drafts``.
    position   of the token: the number of tokens before it.
    resamples  whether the whole vocabulary is sorted for it, see ``Chunk``.
    sampling   parameters of the sequence.
    """

    __slots__ = ("_asked", "drafts", "masks", "position", "resamples", "sampling", "sequence")

    def __init__(
        self,
        sequence: SequenceState,
        drafts: list[int],
        resamples: bool = False,
        masks: Sequence[RowMask] = (),
    ) -> None:
        self.sequence = sequence
        self.drafts = drafts
        self.masks = masks
        self.position = len(sequence.token_ids) + len(drafts)
        self.resamples = resamples
        self.sampling: SamplingParams = sequence.sampling
        self._asked: SampleRow | None = None

    @property
    def penalties(self) -> Penalties | None:
        """Those of the sequence if nothing else modifies the row, which has no draft tokens; else None."""
        return None if self.drafts else self.sequence.modifier.penalties

    def asked(self, vocab: int) -> SampleRow:
        """Return what is asked of the row's ``vocab`` logits, the same record for every row of the sequence."""
        if self._asked is None:
            asked = self.sequence.asked
            if asked is None:
                asked = self.sequence.asked = _asked(self.sampling)
            if asked.num_logprobs == -1:
                asked = asked._replace(num_logprobs=vocab)
            self._asked = asked._replace(all_candidates=True) if self.resamples else asked
        return self._asked


def _asked(params: SamplingParams) -> SampleRow:
    """Return what a sequence asks of its rows; -1 log-probabilities: those of the whole vocabulary."""
    # With ``logprob_token_ids``, theirs instead of those of the most likely tokens.
    count = params.logprobs if params.logprob_token_ids is None else 0
    if params.greedy:
        return SampleRow(num_logprobs=count)
    return SampleRow(params.temperature, params.top_k, params.top_p, params.min_p, num_logprobs=count)


class SamplerColumns:
    """Rows that are sampled together. What depends only on which rows there are is kept while their positions advance.

    seeds      of the rows.
    modified   numbers of the rows whose logits may be modified.
    masked     numbers of the rows with masks.
    asking     numbers of the rows with ``logprob_token_ids``.
    are_random  whether some are sampled at random; known when ``asked`` is.
    failed     numbers of the rows whose sequences have failed before: what is sampled for them does not count.
    token_ids  of the sequences, without draft tokens.
    penalized  numbers of the rows without draft tokens that only penalties modify; none of ``modified``.
    kept       the first of these rows, those that are sampled again and again; the columns themselves if none are.
    positions  of the tokens.
    """

    def __init__(self, rows: list[SamplerRow], are_kept: bool = False) -> None:
        """are_kept: whether the rows are sampled again and again, each time behind one more token."""
        self.rows = rows
        self.kept, self.are_kept = self, are_kept
        self.penalties: PenaltyTable | None = None
        self._counted: CountedRows | None = None
        self.seeds = [row.sequence.spec.seed for row in rows]
        self.modified = [number for number, row in enumerate(rows) if not row.sequence.modifier.is_idle]
        self.penalized: list[int] = []
        if self.modified:
            self.penalized = [number for number in self.modified if rows[number].penalties is not None]
            self.modified = [number for number in self.modified if rows[number].penalties is None]
        self.masked = [number for number, row in enumerate(rows) if row.masks]
        self.asking = [number for number, row in enumerate(rows) if row.sampling.logprob_token_ids is not None]
        self.failed = [number for number, row in enumerate(rows) if row.sequence.failure is not None]
        self.token_ids = [row.sequence.token_ids for row in rows]
        self.are_random = False
        self.positions = [row.position for row in rows]
        self._asked: list[SampleRow] = []
        self._first: SamplerColumns | None = None
        self._keys: NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def asked(self, vocab: int) -> list[SampleRow]:
        """What is asked of each row's ``vocab`` logits."""
        if not self._asked:
            first = [] if self._first is None else self._first.asked(vocab)
            self._asked = first + [row.asked(vocab) for row in self.rows[len(first) :]]
            self.are_random = any(map(attrgetter("temperature"), self._asked))
        return self._asked

    def uniforms(self) -> Sequence[float] | NDArray[np.float64]:
        """The random number of each token."""
        if len(self.rows) < _MANY:
            return uniforms_at(self.seeds, self.positions)
        if self._keys is None:
            self._keys = _keys_of(self.seeds)
        return _uniforms(self._keys, self.positions)

    @property
    def counted(self) -> CountedRows:
        """The rows ``penalized``, for a sampler that counts their tokens."""
        if self._counted is None:
            self._counted = CountedRows(self.penalized, self.penalties_of(self.penalized))
        return self._counted

    def penalties_of(self, numbers: list[int]) -> list[tuple[Penalties, list[int]]]:
        """The penalties of rows of ``penalized``, each with the tokens of its sequence."""
        found = [(self.rows[number].penalties, self.token_ids[number]) for number in numbers]
        return [(penalties, token_ids) for penalties, token_ids in found if penalties is not None]

    def advance(self, positions: list[int]) -> None:
        """Set the positions of the tokens, whose sequences have no draft tokens."""
        self.positions = positions
        for number in self.modified:
            self.rows[number].position = positions[number]

    def behind(self, other: SamplerColumns) -> SamplerColumns:
        """The rows of ``other``, then these."""
        both = SamplerColumns.__new__(SamplerColumns)
        first = len(other.rows)
        both.rows, both.seeds = other.rows + self.rows, other.seeds + self.seeds
        both.positions, both._asked = other.positions + self.positions, []
        both._first, both._keys = other, None
        both.failed = other.failed + [first + number for number in self.failed]
        both.token_ids = other.token_ids + self.token_ids
        both.penalized = other.penalized + [first + number for number in self.penalized]
        both.kept, both.are_kept, both._counted = other.kept, False, None
        both.are_random = False
        both.modified = other.modified + [first + number for number in self.modified]
        both.masked = other.masked + [first + number for number in self.masked]
        both.asking = other.asking + [first + number for number in self.asking]
        return both


class SamplerOutput:
    """Rows whose sampling was launched."""

    def __init__(self, pending: PendingSamples, asked: dict[int, tuple[list[int], Tensor]]) -> None:
        """``asked``: row -> the ids of ``logprob_token_ids`` and their log-probabilities on the device."""
        self._pending = pending
        self._asked = asked

    @property
    def tokens(self) -> Tensor:
        """The sampled tokens, [R] int64 on the device of the logits."""
        return self._pending.tokens

    @cached_property
    def results(self) -> SampleResults:
        """The results, for which it waits."""
        return self._pending.collect()

    def collect(self) -> list[SampledToken]:
        """Wait for the results."""
        return [self.sampled(row) for row in range(len(self.results.tokens))]

    def sampled(self, row: int) -> SampledToken:
        """Wait for the result of one row."""
        results = self.results
        sampled = SampledToken(results.tokens[row], results.logprobs[row])
        if row in results.ranks:
            sampled.logprobs = self.logprobs(row)
        outcome = results.failed.get(row)
        if outcome is SampleOutcome.MORE_CANDIDATES:
            sampled.resample = True
        elif outcome is not None:
            sampled.error = NOT_FINITE if outcome is SampleOutcome.NOT_FINITE else NOTHING_LEFT
        return sampled

    def all_logprobs(self, count: int) -> list[TokenLogprobs | None]:
        """Wait for the log-probabilities of the first ``count`` rows."""
        found = self.results
        top = [found.top.get(row, _NO_TOKENS) for row in range(count)]
        if found.failed or self._asked or _NO_TOKENS in top:
            return [self.logprobs(row) for row in range(count)]
        ranks = [found.ranks[row] for row in range(count)]
        return [
            TokenLogprobs([token, *ids], [logprob, *logprobs], rank)
            for token, logprob, (ids, logprobs), rank in zip(found.tokens, found.logprobs, top, ranks, strict=False)
        ]

    def logprobs(self, row: int) -> TokenLogprobs | None:
        """Wait for the log-probabilities of one row; None if it has none or has failed."""
        results = self.results
        rank = results.ranks.get(row)
        if rank is None or row in results.failed:
            return None
        ids, logprobs = results.top.get(row, _NO_TOKENS)
        found = TokenLogprobs([results.tokens[row], *ids], [results.logprobs[row], *logprobs], rank)
        if row in self._asked:
            token_ids, scores = self._asked[row]
            found.token_ids += token_ids
            found.logprobs += scores.tolist()
            found.is_ranked = False
        return found


def sample(sampler: Sampler, logits: Tensor, rows: list[SamplerRow] | SamplerColumns) -> SamplerOutput:
    """Sample one token per row of ``logits`` [R, V] float32, which may change after the call.

    Log-probabilities are those of the model, before penalties, biases and masks. Masks come last: whatever else a
    request asks for, they decide what is allowed.
    """
    columns = rows if isinstance(rows, SamplerColumns) else SamplerColumns(rows)
    counting = sampler if columns.penalized and isinstance(sampler, PenalizingSampler) else None
    modified: ModifiedLogits | None = None
    if columns.modified or (columns.penalized and counting is None):
        modified = _modified(logits, columns, columns.penalized if counting is None else [])
    logprobs = _asked_logprobs(logits, columns)
    asked = columns.asked(logits.shape[1])
    uniforms: Sequence[float] | NDArray[np.float64] = ()
    if columns.are_random:
        uniforms = columns.uniforms()
    masks = _masks(columns)
    if counting is None:
        return SamplerOutput(sampler(logits, asked, uniforms, modified, masks), logprobs)
    counted = columns.counted
    pending = counting(logits, asked, uniforms, modified, masks, counted.penalties(counting))
    counted.sampled()
    return SamplerOutput(pending, logprobs)


def _modified(logits: Tensor, columns: SamplerColumns, penalized: list[int]) -> ModifiedLogits | None:
    """Return modified copies of the rows of ``logits`` [R, V] that are modified, and of the rows ``penalized``."""
    kept = columns.kept.penalized if penalized and columns.kept.are_kept else []
    changed = penalized[len(kept) :]
    for number in columns.modified:
        row = columns.rows[number]
        if row.sequence.modifier.modifies(row.position, row.drafts):
            changed.append(number)
    if kept:
        return _penalized(logits, columns, changed, kept)
    if not changed:
        return None
    modified = ModifiedLogits(changed, logits.index_select(0, on_device(changed, logits.device)))
    _modify(modified, columns)
    return modified


def _penalized(logits: Tensor, columns: SamplerColumns, changed: list[int], rows: list[int]) -> ModifiedLogits:
    """Return modified copies of the rows ``changed`` and, by the table of penalties, of ``rows``."""
    vocab = logits.shape[1]
    table = columns.kept.penalties
    if table is None:
        table = columns.kept.penalties = PenaltyTable(columns.penalties_of(rows), vocab, logits.device)
    else:
        table.follow()
    every = changed + rows
    copies = torch.empty(len(every) + 1, vocab, dtype=logits.dtype, device=logits.device)  # one is spare for the table
    torch.index_select(logits, 0, on_device(every, logits.device), out=copies[:-1])
    if changed:
        _modify(ModifiedLogits(changed, copies[: len(changed)]), columns)
    table.penalize(copies[len(changed) :])
    return ModifiedLogits(every, copies[:-1])


def _modify(modified: ModifiedLogits, columns: SamplerColumns) -> None:
    """Modify the rows of ``modified``, in place, except for what is in the table of penalties."""
    changed = modified.rows
    penalized = {}
    for number, (values, index) in enumerate(zip(modified.logits, changed, strict=True)):
        row = columns.rows[index]
        occurred = row.sequence.modifier.apply(values, row.sequence.token_ids, row.drafts)
        if occurred is not None:
            penalized[number] = occurred
    if penalized:
        penalize(modified.logits, penalized)


def _asked_logprobs(logits: Tensor, columns: SamplerColumns) -> dict[int, tuple[list[int], Tensor]]:
    """The log-probabilities of ``logprob_token_ids`` by row, with their ids."""
    asked = {}
    for index in columns.asking:
        token_ids = columns.rows[index].sampling.logprob_token_ids
        assert token_ids is not None
        scores = torch.log_softmax(logits[index], dim=-1)
        asked[index] = (token_ids, scores.index_select(0, on_device(token_ids, logits.device)))
    return asked


def _masks(columns: SamplerColumns) -> TokenMasks | None:
    """The tokens that the masks of the rows allow; None if no row has one."""
    if not columns.masked:
        return None
    masked = [(number, columns.rows[number].masks) for number in columns.masked]
    # Whole masks are written: they may have a token more than there are logits.
    num_words = max(mask.num_words for _, masks in masked for mask in masks)
    bits = torch.empty(len(masked) + 1, num_words, dtype=torch.int32)
    address, scratch = bits.data_ptr(), bits[-1]
    for at, (_, (first, *others)) in enumerate(masked):
        first.fill_mask(address + 4 * num_words * at)
        for other in others:
            other.fill_mask(scratch.data_ptr())
            bits[at] &= scratch
    return TokenMasks([index for index, _ in masked], bits[:-1])


_MASK = (1 << 64) - 1
_ADDED, _OF_SEED, _OF_POSITION, *_FACTORS = (
    *(0x632BE59BD9B4E019, 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03),
    *(0xBF58476D1CE4E5B9, 0x94D049BB133111EB),
)
#: Rows from which on arrays are faster than integers.
_MANY = 16


def uniforms_at(seeds: Sequence[int], positions: Sequence[int]) -> list[float]:
    """Return a number in [0, 1) for each seed and position: two rounds of SplitMix64 (Steele et al. 2014)."""
    if len(seeds) < _MANY:
        return [_uniform_at(*pair) for pair in zip(seeds, positions, strict=True)]
    uniforms: list[float] = _uniforms(_keys_of(seeds), positions).tolist()
    return uniforms


def _keys_of(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """The part of the hash that depends on ``seeds``."""
    # Seeds of several answers to a request count on from its own, beyond what an int64 holds.
    keys = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    return keys * np.uint64(_OF_SEED) + np.uint64(_ADDED)


def _uniforms(keys: NDArray[np.uint64], positions: Sequence[int]) -> NDArray[np.float64]:
    """The same as ``uniforms_at``, with ``keys`` of the seeds."""
    value = keys + np.array(positions, dtype=np.uint64) * np.uint64(_OF_POSITION)
    for _ in range(2):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(_FACTORS[0])
        value = (value ^ (value >> np.uint64(27))) * np.uint64(_FACTORS[1])
        value ^= value >> np.uint64(31)
    return (value >> np.uint64(11)) / 2.0**53


def _uniform_at(seed: int, position: int) -> float:
    value = (seed * _OF_SEED + position * _OF_POSITION + _ADDED) & _MASK
    for _ in range(2):
        value = (value ^ (value >> 30)) * _FACTORS[0] & _MASK
        value = (value ^ (value >> 27)) * _FACTORS[1] & _MASK
        value ^= value >> 31
    return (value >> 11) / (1 << 53)
