"""Sampling of tokens from logits: interface, torch reference and implementations.

Penalties, biases and masks are applied to the logits beforehand; log-probabilities are those of the raw logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aiakq.kernels.registry import PluginError
from aiakq.kernels.selection import Implementations
from aiakq.kernels.transfer import on_device, on_host
from aiakq.kernels.types import SamplingProblem

#: Candidates of the reference for top-k, top-p and min-p. Constant, so that a row does not depend on its neighbours.
CANDIDATES = 1024


class SampleRow(NamedTuple):
    """Sampling parameters of one row of logits, the same for every row of a sequence.

    temperature     0: greedy, the first of equal maxima.
    top_k           maximum number of candidates; 0 or less: no limit.
    top_p, min_p    the usual thresholds, relative to the total probability and to the largest probability.
    token           a given token to report on instead of sampling, or -1.
    num_logprobs    number of most likely tokens to report, along with the rank of the token; None: no report.
    all_candidates  whether to sort the whole vocabulary because CANDIDATES tokens were not enough.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    token: int = -1
    num_logprobs: int | None = None
    all_candidates: bool = False


class SampleOutcome(IntEnum):
    """Outcome of sampling one row.

    DONE             a token was sampled.
    NOT_FINITE       the raw logits are not finite.
    NOTHING_LEFT     every allowed token has a modified logit of -inf.
    MORE_CANDIDATES  the candidates do not determine the token: sample again with ``all_candidates``.
    """

    DONE = 0
    NOT_FINITE = 1
    NOTHING_LEFT = 2
    MORE_CANDIDATES = 3


class TopTokens(NamedTuple):
    """The most likely tokens of one row in descending order, and their log-probabilities."""

    ids: list[int]
    logprobs: list[float]


class SampleResults(NamedTuple):
    """The tokens of R rows, in lists of R elements; those of a row are valid if its outcome is DONE.

    tokens    sampled or given.
    logprobs  log-probabilities of the tokens under the raw logits.
    failed    the outcomes other than DONE by row.
    ranks     of the tokens by row, 1 for the most likely token; only of rows with ``num_logprobs``.
    top       the most likely tokens by row; only of rows with ``num_logprobs`` above 0.
    """

    tokens: list[int]
    logprobs: list[float]
    failed: dict[int, SampleOutcome]
    ranks: dict[int, int]
    top: dict[int, TopTokens]

    def outcome(self, row: int) -> SampleOutcome:
        """Return the outcome of a row."""
        return self.failed.get(row, SampleOutcome.DONE)


class ModifiedLogits(NamedTuple):
    """Replacement logits: row ``rows[i]`` is sampled from ``logits[i]`` [V] float32 instead of the raw logits."""

    rows: list[int]
    logits: Tensor


class TokenMasks(NamedTuple):
    """Masks of allowed tokens: row ``rows[i]`` is sampled among those set in ``bits[i]`` on the host, [at least V / 32]
    int32: bit t % 32 of word t // 32 is token t.
    """

    rows: list[int]
    bits: Tensor


class PendingSamples(Protocol):
    """Rows whose sampling has been launched."""

    @property
    def tokens(self) -> Tensor:
        """[R] int64 on the device of the logits, for work launched afterwards."""

    def collect(self) -> SampleResults:
        """Wait for and return the results."""


class Sampler(Protocol):
    """Samples one token per row, for at most R rows per call, by inverting the cumulative distribution."""

    def __call__(
        self,
        raw: Tensor,
        rows: Sequence[SampleRow],
        uniforms: Sequence[float] | NDArray[np.float64] = (),
        modified: ModifiedLogits | None = None,
        masks: TokenMasks | None = None,
    ) -> PendingSamples:
        """Launch sampling from ``raw`` [R, V] float32, which is not modified and may be overwritten after the call.

        uniforms  per row a random number in [0, 1) at which the cumulative distribution is inverted; not needed where
                  no row has a temperature above 0. A sequence or an array.
        """


class SamplingKernel(Protocol):
    """A module that implements the operation."""

    def prepare(self, problem: SamplingProblem) -> Sampler:
        """Bind the operation of one layer."""


IMPLEMENTATIONS = Implementations[SamplingKernel].of_backends("sampling", "cpu", "triton")


def check_plugin(name: str, sampler: Sampler, device: torch.device) -> None:
    """Raise PluginError if ``sampler``, of the implementation ``name`` of another package, has not this interface."""
    needed = "its sampler is called with (raw, rows, uniforms, modified, masks), and collect() returns SampleResults"
    try:
        inspect.signature(sampler).bind(None, (), (), None, None)
        found = sampler(torch.zeros(1, 8, device=device), [SampleRow()], (), None, None).collect()
        reason = "" if isinstance(found, SampleResults) else f"collect() returned {type(found).__name__}"
    except Exception as failure:
        reason = f"{type(failure).__name__}: {failure}"
    if reason:
        package = IMPLEMENTATIONS.package(name)
        text = (
            f"{name!r} ({IMPLEMENTATIONS.group}) of the package {package} does not fit this version: {needed}; {reason}"
        )
        raise PluginError(" ".join(text.split()))


def prepare(problem: SamplingProblem) -> TorchSampler:
    """Return the reference."""
    return TorchSampler(CANDIDATES)


#: Values per row in the tensor packed by ``TorchSampler``.
_PACKED = 6


class TorchSampler:
    """The torch reference, which does not wait for the device. top-k, top-p and min-p are applied to ``candidates``
    tokens of the vocabulary, unless a row requests all.
    """

    def __init__(self, candidates: int) -> None:
        self.candidates = candidates

    def __call__(
        self,
        raw: Tensor,
        rows: Sequence[SampleRow],
        uniforms: Sequence[float] | NDArray[np.float64] = (),
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
        tokens, packed = self._launch(raw, logits, rows, uniforms)
        return TorchPendingSamples(tokens, on_host(packed), rows)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set tokens not allowed by ``bits`` [N, W] int32 to -inf in rows ``rows`` [N] int64 of ``logits`` [R, V]."""
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        allowed = (bits.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(~allowed, float("-inf")))

    def _launch(
        self, raw: Tensor, logits: Tensor, rows: Sequence[SampleRow], uniforms: Sequence[float] | NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [R] int64 sampled from ``logits`` [R, V], and the results for the host in one float64 tensor.

        That tensor holds _PACKED values per row: token, log-probability, whether the raw logits are finite, whether any
        token is left, whether the candidates were enough, and the token's rank; then, for rows that request them, the
        most likely tokens and their log-probabilities.
        """
        device = raw.device
        normalizer = torch.logsumexp(raw, dim=-1)
        tokens, complete = self._tokens(logits, rows, uniforms)
        token_logits = raw.gather(1, tokens.unsqueeze(1))
        ranks = torch.zeros_like(tokens)
        if any(row.num_logprobs is not None for row in rows):
            ranks = (raw > token_logits).sum(dim=-1) + 1
        left = logits.amax(dim=-1) > float("-inf")
        fixed = (tokens, token_logits.squeeze(1) - normalizer, torch.isfinite(normalizer), left, complete, ranks)
        parts = [torch.stack([column.double() for column in fixed], dim=1).flatten()]
        for count, requesting in _by_num_logprobs(rows).items():
            # Logits are large: avoid a copy if all rows request the same number.
            some = slice(None) if len(requesting) == len(rows) else on_device(requesting, device)
            values, ids = (raw[some] - normalizer[some].unsqueeze(1)).topk(count)
            parts += [ids.double().flatten(), values.double().flatten()]
        return tokens, torch.cat(parts)

    def _tokens(
        self, logits: Tensor, rows: Sequence[SampleRow], uniforms: Sequence[float] | NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [R] int64 for ``logits`` [R, V], and [R] bool: whether the candidates were enough."""
        tokens = logits.argmax(dim=-1)
        complete = torch.ones_like(tokens, dtype=torch.bool)
        given = [index for index, row in enumerate(rows) if row.token >= 0]
        if given:
            positions, values = on_device([given, [rows[index].token for index in given]], logits.device)
            tokens.index_copy_(0, positions, values)
        random = [index for index, row in enumerate(rows) if row.temperature > 0 and row.token < 0]
        if random:
            some = on_device(random, logits.device)
            numbers = on_device([[uniforms[index]] for index in random], logits.device, torch.float64)
            sampled, enough = self._random(logits.index_select(0, some), [rows[index] for index in random], numbers)
            tokens, complete = tokens.index_copy(0, some, sampled), complete.index_copy(0, some, enough)
        return tokens, complete

    def _random(self, logits: Tensor, rows: list[SampleRow], uniform: Tensor) -> tuple[Tensor, Tensor]:
        """The same as ``_tokens``, for rows with a temperature above 0; uniform [R, 1] float64."""
        device, vocab = logits.device, logits.shape[1]
        scaled = logits / on_device([[row.temperature] for row in rows], device, logits.dtype)
        tokens = torch.empty(len(rows), dtype=torch.long, device=device)
        complete = torch.ones_like(tokens, dtype=torch.bool)
        cut = [row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in rows]
        if not all(cut):
            uncut = on_device([index for index, is_cut in enumerate(cut) if not is_cut], device)
            weights = torch.softmax(scaled.index_select(0, uncut), dim=-1).double()
            tokens.index_copy_(0, uncut, _invert(weights, uniform.index_select(0, uncut)))
        for every in (False, True):
            chosen = [index for index, is_cut in enumerate(cut) if is_cut and rows[index].all_candidates == every]
            if chosen:
                some = on_device(chosen, device)
                parts = scaled.index_select(0, some), uniform.index_select(0, some), [rows[index] for index in chosen]
                sampled, enough = _sample_cut(*parts, vocab if every else min(self.candidates, vocab))
                tokens.index_copy_(0, some, sampled)
                complete.index_copy_(0, some, enough)
        return tokens, complete


class TorchPendingSamples:
    """See PendingSamples. It keeps no reference to the logits, which the next step overwrites."""

    def __init__(self, tokens: Tensor, packed: Callable[[], list[list[Any]]], rows: Sequence[SampleRow]) -> None:
        self.tokens = tokens
        self._packed, self._rows = packed, rows

    def collect(self) -> SampleResults:
        """See PendingSamples."""
        (numbers,) = self._packed()
        end = _PACKED * len(self._rows)
        tokens, logprobs, finite, left, complete, ranks = (numbers[at:end:_PACKED] for at in range(_PACKED))
        results = SampleResults([int(token) for token in tokens], logprobs, {}, {}, {})
        if not (all(finite) and all(left) and all(complete)):
            for row, flags in enumerate(zip(finite, left, complete, strict=True)):
                if not all(flags):
                    results.failed[row] = _outcome(*flags)
        for row, asked in enumerate(self._rows):
            if asked.num_logprobs is not None:
                results.ranks[row] = int(ranks[row])
        for count, requesting in _by_num_logprobs(self._rows).items():
            values = end + count * len(requesting)
            for row in requesting:
                ids = [int(token) for token in numbers[end : end + count]]
                results.top[row] = TopTokens(ids, numbers[values : values + count])
                end, values = end + count, values + count
            end = values
        return results


def _by_num_logprobs(rows: Sequence[SampleRow]) -> dict[int, list[int]]:
    """Group the rows that request most likely tokens by the number requested."""
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        if row.num_logprobs:
            groups.setdefault(row.num_logprobs, []).append(index)
    return groups


def _outcome(finite: float, left: float, complete: float) -> SampleOutcome:
    if not finite:
        return SampleOutcome.NOT_FINITE
    if not left:
        return SampleOutcome.NOTHING_LEFT
    return SampleOutcome.DONE if complete else SampleOutcome.MORE_CANDIDATES


def _sample_cut(scaled: Tensor, uniform: Tensor, rows: list[SampleRow], candidates: int) -> tuple[Tensor, Tensor]:
    """Sample tokens [R] from ``scaled`` [R, V] restricted by min-p, top-k and top-p, with random numbers ``uniform``
    [R, 1]; also return [R] bool: whether the candidates were enough.
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
    """Sort candidates in descending order and equal ones by token id, an order that topk leaves unspecified."""
    ids, order = ids.sort(dim=-1)
    values, best = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, best)


def _kept_weights(values: Tensor, normalizer: Tensor, rows: list[SampleRow], vocab: int) -> tuple[Tensor, Tensor]:
    """Return the probabilities of candidates ``values`` [R, C], in descending order, with those cut off set to 0; and
    [R] bool: whether C candidates were enough.
    """
    device = values.device
    width = values.shape[1]
    top_k = on_device([[min(row.top_k, vocab) if row.top_k > 0 else vocab] for row in rows], device)
    top_p = on_device([[row.top_p] for row in rows], device, torch.float64)
    min_p = on_device([[row.min_p] for row in rows], device, torch.float64)
    weights = torch.exp((values - normalizer).double())
    kept = weights >= min_p * weights[:, :1]
    kept &= torch.arange(width, device=device) < top_k
    # If neither min-p nor top-k cuts inside the candidates, tokens beyond them count towards the total too.
    ends_inside = ~kept[:, -1:] | (top_k <= width)
    weights = weights * kept
    total = torch.where(ends_inside, weights.sum(dim=-1, keepdim=True), torch.ones_like(min_p))
    before = weights.cumsum(dim=-1) - weights
    kept &= before < top_p * total
    complete = ends_inside.squeeze(1) | ~kept[:, -1]
    return weights * kept, torch.ones_like(complete) if width == vocab else complete


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return per row the first index whose cumulative weight exceeds uniform * total; weights [R, C] float64."""
    cumulative = weights.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).squeeze(1)
    # Rounding may select an index past the last nonzero weight.
    last = weights.shape[1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(index, last)
