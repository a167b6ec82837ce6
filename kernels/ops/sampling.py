"""Sampling, from logits to tokens: the interface, the reference in torch, and the implementations.

An implementation is a module with

    supports(problem: SamplingProblem) -> None, or one sentence why not
    prepare(problem: SamplingProblem) -> Sampler

Whatever changes logits (penalties, biases, masks) is done before; log-probabilities are those of the raw logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from aiakq.kernels.registry import Registry
from aiakq.kernels.transfer import on_device, on_host
from aiakq.kernels.types import SamplingProblem

IMPLEMENTATIONS = Registry(
    "aiakq.implementations.sampling",
    {
        "cpu": "aiakq.kernels.cpu.sampling",
        "triton": "aiakq.kernels.triton.sampling",
        "torch": "aiakq.kernels.ops.sampling",
    },
    plugins_first=True,
)

#: Candidates of the reference for top-k, top-p and min-p. A constant, so that they do not depend on a row's neighbours.
CANDIDATES = 1024


class SampleRow(NamedTuple):
    """What is asked of one row of logits.

    temperature     0: the largest logit, the first of equal ones.
    uniform         the random number in [0, 1) with which the cumulative distribution is inverted.
    top_k           at most this many tokens; 0 or less: no limit.
    top_p, min_p    as usual: of the total probability, of the largest one.
    token           a token to report on instead of sampling one, or -1.
    num_logprobs    how many of the most likely tokens to report besides it, with its rank; None: nothing.
    all_candidates  whether to sort the whole vocabulary, because CANDIDATES were not enough.
    """

    temperature: float = 0.0
    uniform: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    token: int = -1
    num_logprobs: int | None = None
    all_candidates: bool = False


class SampleOutcome(IntEnum):
    """What became of a row.

    NOT_FINITE       its raw logits are not finite.
    NOTHING_LEFT     every modified logit of a token that is allowed is -inf.
    MORE_CANDIDATES  the token is not settled: to be sampled again with ``all_candidates``.
    """

    DONE = 0
    NOT_FINITE = 1
    NOTHING_LEFT = 2
    MORE_CANDIDATES = 3


class SampleResult(NamedTuple):
    """The token of one row, valid if ``outcome`` is DONE.

    logprob       of the raw logits.
    rank          1 for the most likely token; 0 if it was not asked for.
    top_ids       the most likely tokens, best first.
    top_logprobs  theirs.
    """

    token: int
    logprob: float
    outcome: SampleOutcome = SampleOutcome.DONE
    rank: int = 0
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


class ModifiedLogits(NamedTuple):
    """Row ``rows[i]`` is sampled from ``logits[i]`` [V] float32 instead of the raw logits."""

    rows: list[int]
    logits: Tensor


class TokenMasks(NamedTuple):
    """Row ``rows[i]`` is sampled among the tokens allowed by ``bits[i]``, of the host: [at least V / 32] int32, bit
    t % 32 of word t // 32 for token t.
    """

    rows: list[int]
    bits: Tensor


class PendingSamples(Protocol):
    """Rows whose sampling was launched."""

    @property
    def tokens(self) -> Tensor:
        """[R] int64 on the device of the logits, for work launched later."""

    def collect(self) -> list[SampleResult]:
        """Wait for the results, one per row."""


class Sampler(Protocol):
    """Samples one token per row, at most R rows at a time, by inverting the cumulative distribution."""

    def __call__(
        self,
        raw: Tensor,
        rows: Sequence[SampleRow],
        modified: ModifiedLogits | None = None,
        masks: TokenMasks | None = None,
    ) -> PendingSamples:
        """Launch sampling from ``raw`` [R, V] float32, which is not modified and may be overwritten afterwards."""


def supports(problem: SamplingProblem) -> str | None:
    """None: the reference supports every problem."""
    return None


def prepare(problem: SamplingProblem) -> TorchSampler:
    """The reference."""
    return TorchSampler(CANDIDATES)


#: Numbers of every row in what ``TorchSampler`` packs.
_PACKED = 6


class TorchSampler:
    """The reference; it does not wait for the device. Cuts are made among ``candidates`` tokens of the vocabulary,
    unless a row asks for all.
    """

    def __init__(self, candidates: int) -> None:
        self.candidates = candidates

    def __call__(
        self,
        raw: Tensor,
        rows: Sequence[SampleRow],
        modified: ModifiedLogits | None = None,
        masks: TokenMasks | None = None,
    ) -> TorchPendingSamples:
        """See Sampler."""
        logits = raw
        if modified is not None:
            logits = raw.index_copy(0, on_device(modified.rows, raw.device), modified.logits)
        if masks is not None:
            logits = logits.clone() if logits is raw else logits
            self.mask(logits, on_device(masks.rows, raw.device), on_device(masks.bits, raw.device))
        tokens, packed = self._launch(raw, logits, rows)
        return TorchPendingSamples(tokens, on_host(packed), rows)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set what ``bits`` [N, W] int32 do not allow in rows ``rows`` [N] int64 of ``logits`` [R, V] to -inf."""
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        allowed = (bits.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(~allowed, float("-inf")))

    def _launch(self, raw: Tensor, logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
        """Tokens [R] int64 sampled from ``logits`` [R, V], and what the host has to know of them in one tensor float64.

        Packed are _PACKED numbers per row: token, log-probability, whether the raw logits are finite, whether any token
        is left, whether the candidates were enough, and the token's rank; then, for rows that ask for them, the most
        likely tokens and their log-probabilities.
        """
        device = raw.device
        normalizer = torch.logsumexp(raw, dim=-1)
        tokens, complete = self._tokens(logits, rows)
        of_token = raw.gather(1, tokens.unsqueeze(1))
        ranks = torch.zeros_like(tokens)
        if any(row.num_logprobs is not None for row in rows):
            ranks = (raw > of_token).sum(dim=-1) + 1
        left = logits.amax(dim=-1) > float("-inf")
        fixed = (tokens, of_token.squeeze(1) - normalizer, torch.isfinite(normalizer), left, complete, ranks)
        parts = [torch.stack([column.double() for column in fixed], dim=1).flatten()]
        for count, asking in _by_num_logprobs(rows).items():
            # Logits are large: they are not copied if all rows ask for as many.
            some = slice(None) if len(asking) == len(rows) else on_device(asking, device)
            values, ids = (raw[some] - normalizer[some].unsqueeze(1)).topk(count)
            parts += [ids.double().flatten(), values.double().flatten()]
        return tokens, torch.cat(parts)

    def _tokens(self, logits: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, Tensor]:
        """Tokens [R] int64 of ``logits`` [R, V]; and [R] bool, whether the candidates were enough."""
        tokens = logits.argmax(dim=-1)
        complete = torch.ones_like(tokens, dtype=torch.bool)
        given = [at for at, row in enumerate(rows) if row.token >= 0]
        if given:
            places, values = on_device([given, [rows[at].token for at in given]], logits.device)
            tokens.index_copy_(0, places, values)
        random = [at for at, row in enumerate(rows) if row.temperature > 0 and row.token < 0]
        if random:
            some = on_device(random, logits.device)
            sampled, enough = self._random(logits.index_select(0, some), [rows[at] for at in random])
            tokens, complete = tokens.index_copy(0, some, sampled), complete.index_copy(0, some, enough)
        return tokens, complete

    def _random(self, logits: Tensor, rows: list[SampleRow]) -> tuple[Tensor, Tensor]:
        """As ``_tokens``, for rows whose temperature is not 0."""
        device, vocab = logits.device, logits.shape[1]
        uniform = on_device([[row.uniform] for row in rows], device, torch.float64)
        scaled = logits / on_device([[row.temperature] for row in rows], device, logits.dtype)
        tokens = torch.empty(len(rows), dtype=torch.long, device=device)
        complete = torch.ones_like(tokens, dtype=torch.bool)
        cut = [row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in rows]
        if not all(cut):
            uncut = on_device([at for at, is_cut in enumerate(cut) if not is_cut], device)
            weights = torch.softmax(scaled.index_select(0, uncut), dim=-1).double()
            tokens.index_copy_(0, uncut, _invert(weights, uniform.index_select(0, uncut)))
        for every in (False, True):
            chosen = [at for at, is_cut in enumerate(cut) if is_cut and rows[at].all_candidates == every]
            if chosen:
                some = on_device(chosen, device)
                parts = scaled.index_select(0, some), uniform.index_select(0, some), [rows[at] for at in chosen]
                sampled, enough = _sample_cut(*parts, vocab if every else min(self.candidates, vocab))
                tokens.index_copy_(0, some, sampled)
                complete.index_copy_(0, some, enough)
        return tokens, complete


class TorchPendingSamples:
    """See PendingSamples. No reference to the logits is kept: the next step overwrites them."""

    def __init__(self, tokens: Tensor, packed: Callable[[], list[list]], rows: Sequence[SampleRow]) -> None:
        self.tokens = tokens
        self._packed, self._rows = packed, rows

    def collect(self) -> list[SampleResult]:
        """See PendingSamples."""
        numbers = iter(self._packed()[0])
        fixed = [[next(numbers) for _ in range(_PACKED)] for _ in self._rows]
        top: dict[int, tuple[list, list]] = {}
        for count, asking in _by_num_logprobs(self._rows).items():
            ids = [[int(next(numbers)) for _ in range(count)] for _ in asking]
            values = [[next(numbers) for _ in range(count)] for _ in asking]
            top.update(zip(asking, zip(ids, values, strict=True), strict=True))
        results = []
        for at, (token, logprob, finite, left, complete, rank) in enumerate(fixed):
            asked_rank = 0 if self._rows[at].num_logprobs is None else int(rank)
            outcome = _outcome(finite, left, complete)
            results.append(SampleResult(int(token), logprob, outcome, asked_rank, *top.get(at, ())))
        return results


def _by_num_logprobs(rows: Sequence[SampleRow]) -> dict[int, list[int]]:
    """The rows that ask for the most likely tokens, by how many they ask for."""
    found: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        if row.num_logprobs:
            found.setdefault(row.num_logprobs, []).append(at)
    return found


def _outcome(finite: float, left: float, complete: float) -> SampleOutcome:
    if not finite:
        return SampleOutcome.NOT_FINITE
    if not left:
        return SampleOutcome.NOTHING_LEFT
    return SampleOutcome.DONE if complete else SampleOutcome.MORE_CANDIDATES


def _sample_cut(scaled: Tensor, uniform: Tensor, rows: list[SampleRow], candidates: int) -> tuple[Tensor, Tensor]:
    """Tokens [R] of ``scaled`` [R, V] among those that min-p, top-k and top-p leave, with random numbers ``uniform``
    [R, 1]; and [R] bool, whether the candidates were enough.
    """
    vocab = scaled.shape[1]
    normalizer = torch.logsumexp(scaled, dim=-1, keepdim=True)
    if candidates < vocab:
        values, ids = _in_order(*scaled.topk(candidates, dim=-1))
    else:
        values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    weights, complete = _kept_weights(values, normalizer, rows, vocab)
    return ids.gather(1, _invert(weights, uniform).unsqueeze(1)).squeeze(1), complete


def _in_order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates in descending order, equal ones by token id, which topk leaves unspecified."""
    ids, order = ids.sort(dim=-1)
    values, best = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, best)


def _kept_weights(values: Tensor, normalizer: Tensor, rows: list[SampleRow], vocab: int) -> tuple[Tensor, Tensor]:
    """Probabilities of candidates ``values`` [R, C], best first, with 0 where cut off; and [R] bool, whether C was
    enough.
    """
    device = values.device
    width = values.shape[1]
    top_k = on_device([[min(row.top_k, vocab) if row.top_k > 0 else vocab] for row in rows], device)
    top_p = on_device([[row.top_p] for row in rows], device, torch.float64)
    min_p = on_device([[row.min_p] for row in rows], device, torch.float64)
    weights = torch.exp((values - normalizer).double())
    kept = weights >= min_p * weights[:, :1]
    kept &= torch.arange(width, device=device) < top_k
    # Without a cut by min-p or top-k inside the candidates, what lies beyond them counts in the total too.
    ends_inside = ~kept[:, -1:] | (top_k <= width)
    weights = weights * kept
    total = torch.where(ends_inside, weights.sum(dim=-1, keepdim=True), torch.ones_like(min_p))
    before = weights.cumsum(dim=-1) - weights
    kept &= before < top_p * total
    complete = ends_inside.squeeze(1) | ~kept[:, -1]
    return weights * kept, torch.ones_like(complete) if width == vocab else complete


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Per row, the first index whose cumulative weight exceeds uniform x total; weights [R, C] float64."""
    cumulative = weights.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(1)
    # Rounding may point past the last weight that is not 0.
    last = weights.shape[1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(index, last)
