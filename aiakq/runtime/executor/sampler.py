"""Sampling the rows of a step: penalties, biases and masks, then the sampling operation of the device.

A row is a position of a sequence whose next token is sampled. Randomness is stateless: the uniform number of a token is
a hash of its sequence's seed and its position. So a request repeats itself whatever else is in the batch, and after a
preemption, without the state of a generator.

Everything is launched without waiting for the device until the results are collected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiakq.kernels.ops.sampling import (
    ModifiedLogits,
    PendingSamples,
    SampleOutcome,
    Sampler,
    SampleResult,
    SampleRow,
    TokenMasks,
)
from aiakq.kernels.transfer import on_device
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

    def request(self, vocab: int) -> SampleRow:
        """What is asked of the row's ``vocab`` logits."""
        params = self.sampling
        count = vocab if params.logprobs == -1 else params.logprobs
        if params.logprob_token_ids is not None:
            count = 0  # these instead of the most likely ones
        if params.greedy:
            return SampleRow(num_logprobs=count)
        uniform = uniform_at(self.sequence.spec.seed, self.position)
        return SampleRow(
            params.temperature, uniform, params.top_k, params.top_p, params.min_p, -1, count, self.resamples
        )


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
        tokens = [_sampled(result) for result in self._pending.collect()]
        for row, (token_ids, scores) in self._asked.items():
            found = tokens[row].logprobs
            if found is not None:
                found.token_ids += token_ids
                found.logprobs += scores.tolist()
                found.is_ranked = False
        return tokens


def _sampled(result: SampleResult) -> SampledToken:
    token, logprob, outcome, rank, top_ids, top_logprobs = result
    if outcome is SampleOutcome.DONE:
        # Only rows whose log-probabilities were asked for have a rank.
        top = TokenLogprobs([token, *top_ids], [logprob, *top_logprobs], rank) if rank else None
        return SampledToken(token, logprob, top)
    if outcome is SampleOutcome.MORE_CANDIDATES:
        return SampledToken(token, logprob, resample=True)
    return SampledToken(token, logprob, error=NOT_FINITE if outcome is SampleOutcome.NOT_FINITE else NOTHING_LEFT)


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
        for values, index in zip(modified.logits, changed, strict=True):
            rows[index].sequence.modifier.apply(values, rows[index].sequence.token_ids, rows[index].drafts)
    asked = _asked_logprobs(logits, rows)
    return SamplerOutput(sampler(logits, [row.request(vocab) for row in rows], modified, _masks(rows)), asked)


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


def uniform_at(seed: int, position: int) -> float:
    """A number in [0, 1) from ``seed`` and ``position``: two rounds of SplitMix64 (Steele et al. 2014)."""
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    for _ in range(2):
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return (value >> 11) / (1 << 53)
