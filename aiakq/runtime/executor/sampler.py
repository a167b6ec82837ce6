"""Sampling the rows of a step: penalties, biases and masks, then the sampling operation of the device.

A row is a position of a sequence whose next token is sampled. Randomness is stateless: the uniform number of a token is
a hash of its sequence's seed and its position. So a request repeats itself whatever else is in the batch, and after a
preemption, without the state of a generator.

Everything is launched without waiting for the device until the results are collected.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aiakq.kernels.ops.sampling import (
    ModifiedLogits,
    PendingSamples,
    SampleOutcome,
    Sampler,
    SampleRow,
    TokenMasks,
    TopTokens,
)
from aiakq.kernels.transfer import on_device
from aiakq.runtime.executor.penalties import penalize
from aiakq.runtime.executor.row_transforms import RowMask
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import NOT_FINITE, NOTHING_LEFT, SampledToken, TokenLogprobs


class SamplerRow:
    """One row of logits whose token is sampled.

    drafts     draft tokens between the tokens of ``sequence`` and this one.
    masks      of the sequence, behind ``drafts``.
    position   of the token: the number of tokens before it.
    resamples  whether the whole vocabulary is sorted for it, see ``Chunk``.
    sampling   parameters of the sequence.
    """

    __slots__ = ("drafts", "masks", "position", "resamples", "sampling", "sequence")

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

    def asked(self, vocab: int) -> SampleRow:
        """Return what is asked of the row's ``vocab`` logits, the same record for every row of the sequence."""
        asked = self.sequence.asked
        if asked is None:
            asked = self.sequence.asked = _asked(self.sampling)
        if asked.num_logprobs == -1:
            asked = asked._replace(num_logprobs=vocab)
        return asked._replace(all_candidates=True) if self.resamples else asked


def _asked(params: SamplingParams) -> SampleRow:
    """Return what a sequence asks of its rows; -1 log-probabilities: those of the whole vocabulary."""
    # With ``logprob_token_ids``, theirs instead of those of the most likely tokens.
    count = params.logprobs if params.logprob_token_ids is None else 0
    if params.greedy:
        return SampleRow(num_logprobs=count)
    return SampleRow(params.temperature, params.top_k, params.top_p, params.min_p, num_logprobs=count)


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

    def collect(self) -> list[SampledToken]:
        """Wait for the results."""
        results = self._pending.collect()
        tokens = list(map(SampledToken, results.tokens, results.logprobs))
        for row, outcome in results.failed.items():
            sampled = tokens[row]
            if outcome is SampleOutcome.MORE_CANDIDATES:
                sampled.resample = True
            else:
                sampled.error = NOT_FINITE if outcome is SampleOutcome.NOT_FINITE else NOTHING_LEFT
        for row, rank in results.ranks.items():
            if row not in results.failed:
                sampled = tokens[row]
                top = results.top.get(row, TopTokens([], []))
                sampled.logprobs = TokenLogprobs([sampled.token, *top.ids], [sampled.logprob, *top.logprobs], rank)
        for row, (token_ids, scores) in self._asked.items():
            found = tokens[row].logprobs
            if found is not None:
                found.token_ids += token_ids
                found.logprobs += scores.tolist()
                found.is_ranked = False
        return tokens


def sample(sampler: Sampler, logits: Tensor, rows: list[SamplerRow]) -> SamplerOutput:
    """Sample one token per row of ``logits`` [R, V] float32, which may change after the call.

    Log-probabilities are those of the model, before penalties, biases and masks. Masks come last: whatever else a
    request asks for, they decide what is allowed.
    """
    vocab = logits.shape[1]
    changed = [index for index, row in enumerate(rows) if row.sequence.modifier.modifies(row.position, row.drafts)]
    modified = None
    if changed:
        modified = ModifiedLogits(changed, logits.index_select(0, on_device(changed, logits.device)))
        penalized = {}
        for number, (values, index) in enumerate(zip(modified.logits, changed, strict=True)):
            row = rows[index]
            occurred = row.sequence.modifier.apply(values, row.sequence.token_ids, row.drafts)
            if occurred is not None:
                penalized[number] = occurred
        if penalized:
            penalize(modified.logits, penalized)
    logprobs = _asked_logprobs(logits, rows)
    asked = [row.asked(vocab) for row in rows]
    uniforms: Sequence[float] = ()
    if any(one.temperature for one in asked):
        uniforms = uniforms_at([row.sequence.spec.seed for row in rows], [row.position for row in rows])
    return SamplerOutput(sampler(logits, asked, uniforms, modified, _masks(rows)), logprobs)


def _asked_logprobs(logits: Tensor, rows: list[SamplerRow]) -> dict[int, tuple[list[int], Tensor]]:
    """The log-probabilities of ``logprob_token_ids`` by row, with their ids."""
    asked = {}
    for index, row in enumerate(rows):
        token_ids = row.sampling.logprob_token_ids
        if token_ids is not None:
            scores = torch.log_softmax(logits[index], dim=-1)
            asked[index] = (token_ids, scores.index_select(0, on_device(token_ids, logits.device)))
    return asked


def _masks(rows: list[SamplerRow]) -> TokenMasks | None:
    """The tokens that the masks of ``rows`` allow; None if no row has one."""
    masked = [(index, row.masks) for index, row in enumerate(rows) if row.masks]
    if not masked:
        return None
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
    # Seeds of several answers to a request count on from its own, beyond what an int64 holds.
    value = np.array([seed & _MASK for seed in seeds], dtype=np.uint64) * np.uint64(_OF_SEED)
    value += np.array(positions, dtype=np.uint64) * np.uint64(_OF_POSITION) + np.uint64(_ADDED)
    for _ in range(2):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(_FACTORS[0])
        value = (value ^ (value >> np.uint64(27))) * np.uint64(_FACTORS[1])
        value ^= value >> np.uint64(31)
    uniforms: list[float] = ((value >> np.uint64(11)) / 2.0**53).tolist()
    return uniforms


def _uniform_at(seed: int, position: int) -> float:
    value = (seed * _OF_SEED + position * _OF_POSITION + _ADDED) & _MASK
    for _ in range(2):
        value = (value ^ (value >> 30)) * _FACTORS[0] & _MASK
        value = (value ^ (value >> 27)) * _FACTORS[1] & _MASK
        value ^= value >> 31
    return (value >> 11) / (1 << 53)
