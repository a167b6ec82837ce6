"""From logits to tokens, for all rows of a step at once.

A row is a position of a sequence whose next token is sampled. Randomness is stateless: the uniform number of a token is
a hash of its sequence's seed and its position. So a request repeats itself whatever else is in the batch, and after a
preemption, without the state of a generator.

Everything is launched without waiting for the device until the results are collected.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aiakq.kernels.cpu import sampling as native
from aiakq.kernels.ops import sampling
from aiakq.runtime.engine.messages import NOT_FINITE, NOTHING_LEFT, TokenLogprobs
from aiakq.runtime.engine.records import SampledToken
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.executor.transfer import on_device, on_host
from aiakq.runtime.sampling_params import LogitsProcessor, SamplingParams

#: Candidates for top-k, top-p and min-p. Where they do not settle a row, its token is sampled again from the whole
#: vocabulary, and so are the sequence's later ones. A constant, so that candidates do not depend on a row's neighbours.
CANDIDATES = 1024


class SamplerRow:
    """One row of logits whose token is sampled.

    position   of the token: the number of tokens of ``sequence`` before it.
    resamples  whether the whole vocabulary is sorted for it, see ``Chunk``.
    sampling   parameters of the sequence.
    """

    __slots__ = ("position", "resamples", "sampling", "sequence")

    def __init__(self, sequence: SequenceState, position: int, resamples: bool = False) -> None:
        self.sequence = sequence
        self.position = position
        self.resamples = resamples
        self.sampling: SamplingParams = sequence.sampling

    @property
    def uniform(self) -> float:
        """The random number in [0, 1) of this row."""
        return uniform_at(self.sequence.spec.seed, self.position)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens before this row's."""
        return self.sequence.token_ids[self.sequence.num_prompt : self.position]

    @property
    def masks_stops(self) -> bool:
        """Whether the sequence must not end with this token."""
        return self.position - self.sequence.num_prompt < self.sampling.min_tokens


@dataclass(frozen=True)
class SamplerOutput:
    """Sampled tokens [R] int64 on the device of the logits; ``collect`` waits for them and for all else that the host
    has to know of each row.
    """

    tokens: Tensor
    collect: Callable[[], list[SampledToken]]


def sample(logits: Tensor, rows: list[SamplerRow]) -> SamplerOutput:
    """Sample one token per row of ``logits`` [R, V] float32, which may change after the call.

    Log-probabilities are those of the model, before penalties, biases and masks.
    """
    changed = [at for at, row in enumerate(rows) if row.sequence.changes_logits or row.masks_stops]
    if not changed:
        own = logits[:0]
    else:
        own = logits.index_select(0, on_device(changed, logits.device))
        _apply_changes(own, [rows[at] for at in changed])
    if _is_native(logits):
        # A row of which nothing is left is sampled from the raw logits, and then fails.
        empty = [at for at, best in enumerate(own.amax(dim=-1).tolist() if changed else ()) if best == float("-inf")]
        if empty:
            own[empty] = logits[[changed[at] for at in empty]]
        results = _sample_natively(logits, changed, own, rows)
        for at in empty:
            results[changed[at]].error = results[changed[at]].error or NOTHING_LEFT
        return SamplerOutput(torch.tensor([result.token for result in results]), lambda: results)
    final = logits.index_copy(0, on_device(changed, logits.device), own) if changed else logits
    tokens, packed = _sample_rows(logits, final, rows)
    arriving = on_host(packed)
    # No reference to the logits is kept: the next step writes over them.
    vocab = logits.shape[1]
    return SamplerOutput(tokens, lambda: _unpack(arriving()[0], rows, vocab))


def _is_native(logits: Tensor) -> bool:
    return logits.stride(1) == 1 and sampling.implementation(logits.dtype, logits.device) == "cpu"


#: Numbers of every row in what ``_sample_rows`` packs.
_FIXED = 6


def _unpack(packed: list[float], rows: list[SamplerRow], vocab: int) -> list[SampledToken]:
    """The results that ``_sample_rows`` packed."""
    numbers = iter(packed)
    fixed = [[next(numbers) for _ in range(_FIXED)] for _ in rows]
    results = []
    for row, (token, logprob, finite, left, complete, rank) in zip(rows, fixed, strict=True):
        count = _top_count(row, vocab)
        top = None
        if count is not None:
            ids, values = ([next(numbers) for _ in range(count)] for _ in range(2))
            top = TokenLogprobs([int(token), *map(int, ids)], [logprob, *values], int(rank))
        failure = NOT_FINITE if not finite else NOTHING_LEFT if not left else None
        resample = not (failure or complete)
        results.append(SampledToken(int(token), logprob, None if failure else top, failure, resample))
    return results


def _top_count(row: SamplerRow, vocab: int) -> int | None:
    """How many of the most likely tokens a request asks for, or None."""
    count = row.sampling.logprobs
    return vocab if count == -1 else count


def _sample_rows(raw: Tensor, logits: Tensor, rows: list[SamplerRow]) -> tuple[Tensor, Tensor]:
    """Tokens [R] int64 sampled from ``logits`` [R, V], and what the host has to know of them in one tensor float64.

    ``raw`` [R, V] are the logits before penalties and masks. Packed are _FIXED numbers per row: token, log-probability,
    whether the logits are finite, whether the request leaves any token, whether the candidates were enough, and the
    token's rank; then, for rows that ask for them, the most likely tokens and their log-probabilities.
    """
    device = raw.device
    normalizer = torch.logsumexp(raw, dim=-1)
    tokens = logits.argmax(dim=-1)
    complete = torch.ones_like(tokens, dtype=torch.bool)
    random = [at for at, row in enumerate(rows) if not row.sampling.greedy]
    if random:
        some = on_device(random, device)
        sampled, enough = _sample_random(logits.index_select(0, some), [rows[at] for at in random])
        tokens, complete = tokens.index_copy(0, some, sampled), complete.index_copy(0, some, enough)
    of_token = raw.gather(1, tokens.unsqueeze(1))
    ranks = torch.zeros_like(tokens)
    counts = [_top_count(row, raw.shape[1]) for row in rows]
    if any(count is not None for count in counts):
        ranks = (raw > of_token).sum(dim=-1) + 1
    left = logits.amax(dim=-1) > float("-inf")
    fixed = (tokens, of_token.squeeze(1) - normalizer, torch.isfinite(normalizer), left, complete, ranks)
    parts = [torch.stack([column.double() for column in fixed], dim=1).flatten()]
    for at, count in enumerate(counts):
        if count is not None:
            values, ids = (raw[at] - normalizer[at]).topk(count)
            parts += [ids.double(), values.double()]
    return tokens, torch.cat(parts)


def _sample_natively(raw: Tensor, changed: list[int], own: Tensor, rows: list[SamplerRow]) -> list[SampledToken]:
    """As ``_sample_rows``, by the native library, which neither sorts nor copies the rows. Row ``changed[i]`` of the
    logits is ``own[i]``, the others are those of ``raw`` [R, V].
    """
    vocab = raw.shape[1]
    asked = native.choices(len(rows))
    at, step = raw.data_ptr(), raw.stride(0) * 4
    for choice, row in zip(asked, rows, strict=True):
        params = row.sampling
        choice.logits = choice.raw = at
        at += step
        choice.given = -1
        if params.greedy:
            choice.temperature = 0.0
        else:
            choice.temperature, choice.uniform = params.temperature, row.uniform
            choice.top_k, choice.top_p, choice.min_p = max(params.top_k, 0), params.top_p, params.min_p
        if params.logprobs is not None:
            choice.ranked, choice.count = 1, vocab if params.logprobs == -1 else min(params.logprobs, vocab)
    for index, place in enumerate(changed):
        asked[place].logits = own.data_ptr() + index * vocab * 4
    wants_top = any(choice.count for choice in asked)
    ids, values = native.top_buffers(asked) if wants_top else (None, None)
    native.choose(asked, vocab)
    results = []
    at = 0
    for choice, row in zip(asked, rows, strict=True):
        token, logprob, count = choice.token, choice.log_probability, choice.count
        top = None
        if row.sampling.logprobs is not None:
            top = TokenLogprobs([token], [logprob], choice.rank)
            if ids is not None and values is not None:
                top.token_ids += ids[at : at + count].tolist()
                top.logprobs += values[at : at + count].tolist()
                at += count
        if math.isfinite(choice.normalizer):
            results.append(SampledToken(token, logprob, top))
        else:
            results.append(SampledToken(token, logprob, error=NOT_FINITE))
    return results


def prompt_logprobs(logits: Tensor, targets: list[int], count: int) -> Callable[[], list[TokenLogprobs]]:
    """Log-probabilities of prompt tokens: row i of ``logits`` [R, V] float32, which may change after the call, predicts
    ``targets[i]``. The function returned waits for them.
    """
    count = logits.shape[1] if count == -1 else count
    if _is_native(logits):
        found = _prompt_logprobs_natively(logits, targets, count)
        return lambda: found
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    of_target = logits.gather(1, on_device(targets, logits.device).unsqueeze(1))
    values, ids = (logits - normalizer).topk(count, dim=-1)
    ranks = (logits > of_target).sum(dim=-1) + 1
    arriving = on_host((of_target - normalizer).squeeze(1), ranks, ids, values)
    return lambda: [
        TokenLogprobs([token, *row_ids], [logprob, *row_values], rank)
        for token, logprob, rank, row_ids, row_values in zip(targets, *arriving(), strict=True)
    ]


def _prompt_logprobs_natively(logits: Tensor, targets: list[int], count: int) -> list[TokenLogprobs]:
    asked = native.choices(len(targets))
    at, step = logits.data_ptr(), logits.stride(0) * 4
    for choice, target in zip(asked, targets, strict=True):
        choice.logits = choice.raw = at
        at += step
        choice.given, choice.ranked, choice.count = target, 1, count
    ids, values = native.top_buffers(asked)
    native.choose(asked, logits.shape[1])
    return [
        TokenLogprobs([choice.token, *row_ids], [choice.log_probability, *row_values], choice.rank)
        for choice, row_ids, row_values in zip(
            asked, ids.view(len(targets), count).tolist(), values.view(len(targets), count).tolist(), strict=True
        )
    ]


def _apply_changes(logits: Tensor, rows: list[SamplerRow]) -> None:
    """Penalties, biases and masks, in vLLM's order; modifies ``logits`` [R, V].

    Tokens are counted on the host, which knows them: for a count on a GPU the host would have to wait.
    """
    for values, row in zip(logits, rows, strict=True):
        params, spec, device = row.sampling, row.sequence.spec, values.device
        outputs = row.output_token_ids
        for process in row.sequence.logits_processors:
            values.copy_(_processed(process, spec.prompt_token_ids, outputs, values))
        if params.allowed_token_ids is not None:
            hidden = torch.ones_like(values, dtype=torch.bool)
            hidden.index_fill_(0, on_device(params.allowed_token_ids, device, torch.long), False)
            values.masked_fill_(hidden, float("-inf"))
        if params.logit_bias:
            ids = on_device(list(params.logit_bias), device)
            values[ids] += on_device(list(params.logit_bias.values()), device)
        banned = _banned(spec.bad_word_ids, outputs)
        if banned:
            values.index_fill_(0, on_device(banned, device, torch.long), float("-inf"))
        if row.masks_stops:
            values.index_fill_(0, on_device(row.sequence.end_ids, device, torch.long), float("-inf"))
        if params.repetition_penalty != 1:
            seen = on_device(sorted(set(row.sequence.token_ids[: row.position])), device)
            of_seen = values[seen]
            factor = params.repetition_penalty
            values[seen] = torch.where(of_seen > 0, of_seen / factor, of_seen * factor)
        counts = Counter(outputs)
        if counts and (params.frequency_penalty or params.presence_penalty):
            ids, times = on_device(list(counts), device), on_device(list(counts.values()), device)
            values[ids] -= params.frequency_penalty * times + params.presence_penalty


def _processed(process: LogitsProcessor, prompt: list[int], outputs: list[int], values: Tensor) -> Tensor:
    """The logits that a user's function returns; it may take the prompt as well, as in vLLM."""
    takes_prompt = len(inspect.signature(process).parameters) >= 3
    return process(prompt, outputs, values) if takes_prompt else process(outputs, values)


def _banned(words: list[list[int]], outputs: list[int]) -> list[int]:
    """Tokens that would complete one of ``words``."""
    return [word[-1] for word in words if len(word) == 1 or outputs[-(len(word) - 1) :] == word[:-1]]


def _sample_random(logits: Tensor, rows: list[SamplerRow]) -> tuple[Tensor, Tensor]:
    """Random tokens [R] of ``logits`` [R, V] by inverting the cumulative distribution; and [R] bool, whether the
    candidates were enough.
    """
    device = logits.device
    params = [row.sampling for row in rows]
    uniform = on_device([[row.uniform] for row in rows], device, torch.float64)
    scaled = logits / on_device([[one.temperature] for one in params], device, logits.dtype)
    tokens = torch.empty(len(rows), dtype=torch.long, device=device)
    complete = torch.ones_like(tokens, dtype=torch.bool)
    cut = [one.top_k > 0 or one.top_p < 1 or one.min_p > 0 for one in params]
    if not all(cut):
        plain = on_device([at for at, is_cut in enumerate(cut) if not is_cut], device)
        weights = torch.softmax(scaled.index_select(0, plain), dim=-1).double()
        tokens.index_copy_(0, plain, _invert(weights, uniform.index_select(0, plain)))
    for resamples in (False, True):
        chosen = [at for at, is_cut in enumerate(cut) if is_cut and rows[at].resamples == resamples]
        if chosen:
            some = on_device(chosen, device)
            parts = scaled.index_select(0, some), uniform.index_select(0, some), [params[at] for at in chosen]
            vocab = logits.shape[1]
            sampled, enough = _sample_filtered(*parts, vocab if resamples else min(CANDIDATES, vocab))
            tokens.index_copy_(0, some, sampled)
            complete.index_copy_(0, some, enough)
    return tokens, complete


def _sample_filtered(
    scaled: Tensor, uniform: Tensor, params: list[SamplingParams], candidates: int
) -> tuple[Tensor, Tensor]:
    """Random tokens [R] among those that min-p, top-k and top-p leave; the second result as of ``_sample_random``."""
    vocab = scaled.shape[1]
    normalizer = torch.logsumexp(scaled, dim=-1, keepdim=True)
    if candidates < vocab:
        values, ids = _in_order(*scaled.topk(candidates, dim=-1))
    else:
        values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    weights, complete = _kept_weights(values, normalizer, params, vocab)
    return ids.gather(1, _invert(weights, uniform).unsqueeze(1)).squeeze(1), complete


def _in_order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates in descending order, equal ones by token id, which topk leaves unspecified."""
    ids, order = ids.sort(dim=-1)
    values, best = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, best)


def _kept_weights(
    values: Tensor, normalizer: Tensor, params: list[SamplingParams], vocab: int
) -> tuple[Tensor, Tensor]:
    """Probabilities of candidates ``values`` [R, C], best first, with 0 where cut off; and whether C was enough."""
    device = values.device
    width = values.shape[1]
    top_k = on_device([[min(one.top_k, vocab) if one.top_k > 0 else vocab] for one in params], device)
    top_p = on_device([[one.top_p] for one in params], device, torch.float64)
    min_p = on_device([[one.min_p] for one in params], device, torch.float64)
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


_MASK = (1 << 64) - 1


def uniform_at(seed: int, position: int) -> float:
    """A number in [0, 1) from ``seed`` and ``position``: two rounds of SplitMix64 (Steele et al. 2014)."""
    value = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    for _ in range(2):
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return (value >> 11) / (1 << 53)
