"""Sampling of tokens from logits: interface, torch reference and implementations.

Biases are applied to the logits beforehand, and penalties unless the sampler is a ``PenalizingSampler``;
log-probabilities are those of the raw logits.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aiakq.kernels.registry import PluginError
from aiakq.kernels.selection import Implementations
from aiakq.kernels.transfer import copies_on_host, on_device
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


#: An index of some rows, or of all.
Selected = Tensor | slice
#: Values per row in the tensor packed by ``TorchSampler``.
_PACKED = 6


class RowTensors:
    """What rows ask for, on the device. It is kept, because most steps have the rows of the step before.

    has_ranks    whether any row gets a rank.
    is_chosen    whether the tokens of some rows are the first of equal maxima: greedy rows.
    given        rows with a given token, and the tokens, [n] int64 each; None if there are none.
    random       numbers of the rows that are sampled at random.
    random_rows  the same, which select all rows without a copy if these are all.
    temperature  [len(random), 1] float32 of them.
    uncut        those of ``random`` without top-k, top-p and min-p; None if there are none.
    cuts         the others, see ``Cut``.
    top          rows with the same number of most likely tokens, by that number.
    """

    def __init__(self, rows: list[SampleRow], vocab: int, device: torch.device) -> None:
        self.rows, self.vocab, self.device = rows, vocab, device
        self.has_ranks = any(row.num_logprobs is not None for row in rows)
        given = [index for index, row in enumerate(rows) if row.token >= 0]
        self.given: Tensor | None = None
        if given:
            self.given = on_device([given, [rows[index].token for index in given]], device)
        self.random = [index for index, row in enumerate(rows) if row.temperature > 0 and row.token < 0]
        self.is_chosen = len(self.random) < len(rows)
        self.random_rows = self._some(self.random, len(rows))
        chosen = [rows[index] for index in self.random]
        self.temperature = on_device([[row.temperature] for row in chosen], device, torch.float32)
        is_cut = [row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in chosen]
        self.uncut: Selected | None = None
        if not all(is_cut):
            self.uncut = self._some([index for index, cut in enumerate(is_cut) if not cut], len(chosen))
        self.cuts = []
        for every in (False, True):
            some = [index for index, cut in enumerate(is_cut) if cut and chosen[index].all_candidates == every]
            if some:
                selected = self._some(some, len(chosen))
                self.cuts.append(Cut.of([chosen[index] for index in some], selected, every, vocab, device))
        self.top = _by_num_logprobs(rows)
        self.top_rows = {count: self._some(some, len(rows)) for count, some in self.top.items()}

    def _some(self, some: list[int], count: int) -> Selected:
        """Return an index of ``some`` of ``count`` rows. Logits are large: all of them are not copied."""
        return slice(None) if len(some) == count else on_device(some, self.device, torch.long)


class Cut(NamedTuple):
    """Rows of those sampled at random that are restricted by min-p, top-k and top-p, [n, 1] each.

    rows   their index among those sampled at random.
    every  whether all tokens of the vocabulary are candidates.
    """

    rows: Selected
    every: bool
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @staticmethod
    def of(rows: list[SampleRow], selected: Selected, every: bool, vocab: int, device: torch.device) -> Cut:
        """Return the parameters of ``rows``."""
        top_k = on_device([[min(row.top_k, vocab) if row.top_k > 0 else vocab] for row in rows], device)
        top_p = on_device([[row.top_p] for row in rows], device, torch.float64)
        min_p = on_device([[row.min_p] for row in rows], device, torch.float64)
        return Cut(selected, every, top_k, top_p, min_p)


class TorchSampler:
    """The torch reference, which does not wait for the device. top-k, top-p and min-p are applied to ``candidates``
    tokens of the vocabulary, unless a row requests all.
    """

    def __init__(self, candidates: int) -> None:
        self.candidates = candidates
        self._kept: RowTensors | None = None

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
        kept = self._kept
        if kept is None or kept.rows != rows or kept.vocab != raw.shape[1] or kept.device != raw.device:
            kept = self._kept = RowTensors(list(rows), raw.shape[1], raw.device)
        tokens, packed = self._launch(raw, logits, kept, uniforms)
        return TorchPendingSamples(tokens, copies_on_host(packed), kept)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set tokens not allowed by ``bits`` [N, W] int32 to -inf in rows ``rows`` [N] int64 of ``logits`` [R, V]."""
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        allowed = (bits.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill(~allowed, float("-inf")))

    def _launch(
        self, raw: Tensor, logits: Tensor, rows: RowTensors, uniforms: Sequence[float] | NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [R] int64 sampled from ``logits`` [R, V], and the results for the host in one tensor of floats.

        That tensor holds _PACKED times R values: tokens, log-probabilities, whether the raw logits are finite, whether
        any token is left, whether the candidates were enough, and the tokens' ranks; then, for rows that request them,
        the most likely tokens and their log-probabilities.
        """
        if rows.random or rows.given is not None:
            tokens, normalizer, packed = self._chosen(raw, logits, rows, uniforms)
        else:
            tokens, normalizer, packed = self.greedy(raw, logits, rows.has_ranks)
        parts = [packed]
        for count, some in rows.top_rows.items():
            values, ids = (raw[some] - normalizer[some].unsqueeze(1)).topk(count)
            parts += [ids.double().flatten(), values.double().flatten()]
        return tokens, packed if len(parts) == 1 else torch.cat(parts)

    def greedy(self, raw: Tensor, logits: Tensor, has_ranks: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first of the most likely tokens [R] int64 by ``logits``, the logarithms [R] float32 of the sums of
        exponentials of ``raw``, and the results for the host, [_PACKED * R] float64, or float32, which holds them too;
        ranks need not be right without ``has_ranks``.
        """
        tokens = logits.argmax(dim=-1)
        normalizer = torch.logsumexp(raw, dim=-1)
        return tokens, normalizer, _packed(raw, logits, tokens, normalizer, torch.ones_like(tokens), has_ranks)

    def _chosen(
        self, raw: Tensor, logits: Tensor, rows: RowTensors, uniforms: Sequence[float] | NDArray[np.float64]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same where some tokens are given or sampled at random."""
        normalizer = torch.logsumexp(raw, dim=-1)
        tokens, complete = self._tokens(logits, rows, uniforms)
        return tokens, normalizer, _packed(raw, logits, tokens, normalizer, complete, rows.has_ranks)

    def _tokens(
        self, logits: Tensor, rows: RowTensors, uniforms: Sequence[float] | NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [R] int64 for ``logits`` [R, V], and [R] bool: whether the candidates were enough."""
        complete = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        if not rows.random:
            tokens = logits.argmax(dim=-1)
        else:
            numbers = np.asarray(uniforms, np.float64)
            numbers = numbers[rows.random] if rows.is_chosen else numbers
            uniform = on_device(torch.from_numpy(numbers).unsqueeze(1), logits.device)
            sampled, enough = self._random(logits[rows.random_rows], rows, uniform)
            if not rows.is_chosen:
                return sampled, enough
            tokens = logits.argmax(dim=-1)
            tokens[rows.random_rows], complete[rows.random_rows] = sampled, enough
        if rows.given is not None:
            tokens.index_copy_(0, *rows.given.unbind(0))
        return tokens, complete

    def _random(self, logits: Tensor, rows: RowTensors, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """The same as ``_tokens``, for rows with a temperature above 0; uniform [R, 1] float64."""
        scaled = logits / rows.temperature
        tokens = torch.empty(len(scaled), dtype=torch.long, device=logits.device)
        complete = torch.ones_like(tokens, dtype=torch.bool)
        if rows.uncut is not None:
            weights = torch.softmax(scaled[rows.uncut], dim=-1).double()
            tokens[rows.uncut] = _invert(weights, uniform[rows.uncut])
        for cut in rows.cuts:
            candidates = rows.vocab if cut.every else min(self.candidates, rows.vocab)
            sampled, enough = _sample_cut(scaled[cut.rows], uniform[cut.rows], cut, candidates)
            tokens[cut.rows], complete[cut.rows] = sampled, enough
        return tokens, complete


class TorchPendingSamples:
    """See PendingSamples. It keeps no reference to the logits, which the next step overwrites."""

    def __init__(self, tokens: Tensor, packed: Callable[[], list[Tensor]], rows: RowTensors) -> None:
        self.tokens = tokens
        self._packed, self._rows = packed, rows

    def collect(self) -> SampleResults:
        """See PendingSamples."""
        (packed,) = self._packed()
        numbers, rows = packed.numpy(), self._rows
        end = _PACKED * len(rows.rows)
        tokens, logprobs, finite, left, complete, ranks = numbers[:end].reshape(_PACKED, -1)
        results = SampleResults(tokens.astype(np.int64).tolist(), logprobs.tolist(), {}, {}, {})
        failed = (finite * left * complete == 0).nonzero()[0].tolist()
        results.failed.update((row, _outcome(finite[row], left[row], complete[row])) for row in failed)
        if rows.has_ranks:
            found = ranks.astype(np.int64).tolist()
            results.ranks.update((row, found[row]) for row, one in enumerate(rows.rows) if one.num_logprobs is not None)
        for count, requesting in rows.top.items():
            size = count * len(requesting)
            ids, values = numbers[end : end + 2 * size].reshape(2, -1, count)
            pairs = zip(ids.astype(np.int64).tolist(), values.tolist(), strict=True)
            results.top.update(zip(requesting, itertools.starmap(TopTokens, pairs), strict=True))
            end += 2 * size
        return results


def _packed(
    raw: Tensor, logits: Tensor, tokens: Tensor, normalizer: Tensor, complete: Tensor, has_ranks: bool
) -> Tensor:
    """Return the results of rows for the host, [_PACKED * R] float64."""
    token_logits = raw.gather(1, tokens.unsqueeze(1))
    ranks = (raw > token_logits).sum(dim=-1) + 1 if has_ranks else torch.zeros_like(tokens)
    left = logits.amax(dim=-1) > float("-inf")
    fixed = (tokens, token_logits.squeeze(1) - normalizer, torch.isfinite(normalizer), left, complete, ranks)
    return torch.cat([column.double() for column in fixed])


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


def _sample_cut(scaled: Tensor, uniform: Tensor, cut: Cut, candidates: int) -> tuple[Tensor, Tensor]:
    """Sample tokens [R] from ``scaled`` [R, V] restricted by ``cut``, with random numbers ``uniform`` [R, 1]; also
    return [R] bool: whether the candidates were enough.
    """
    vocab = scaled.shape[1]
    normalizer = torch.logsumexp(scaled, dim=-1, keepdim=True)
    if candidates < vocab:
        values, ids = _in_order(*scaled.topk(candidates, dim=-1))
    else:
        values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    weights, complete = _kept_weights(values, normalizer, cut, vocab)
    return ids.gather(1, _invert(weights, uniform).unsqueeze(1)).squeeze(1), complete


def _in_order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort candidates in descending order and equal ones by token id, an order that topk leaves unspecified."""
    ids, order = ids.sort(dim=-1)
    values, best = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, best)


def _kept_weights(values: Tensor, normalizer: Tensor, cut: Cut, vocab: int) -> tuple[Tensor, Tensor]:
    """Return the probabilities of candidates ``values`` [R, C], in descending order, with those cut off set to 0; and
    [R] bool: whether C candidates were enough.
    """
    device, width = values.device, values.shape[1]
    top_k, top_p, min_p = cut.top_k, cut.top_p, cut.min_p
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
