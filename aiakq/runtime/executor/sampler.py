"""From logits to tokens, for all rows of a step at once.

Randomness is stateless: the uniform number of a token is a hash of its request's seed and its position. So a request
repeats itself whatever else is in the batch, and after a preemption, without any generator to keep.

Everything is launched, and nothing waited for until the results are asked for.
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
from aiakq.runtime.engine.messages import NOTHING_LEFT, LocalSpec, RequestSpec, TokenLogprobs
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.executor.transfer import on_device, on_host
from aiakq.runtime.sampling_params import LogitsProcessor

#: Candidates looked at for top-k, top-p and min-p; where a row's cut lies beyond, its token is drawn again, from all,
#: and so are the sequence's later ones. A constant, so that candidates do not depend on a row's neighbours.
CANDIDATES = 1024

NOT_FINITE = "the model's output is not finite (overflow)"


@dataclass
class Sampled:
    """The next token of one sequence; ``logprob`` is of the raw logits.

    error  names a row that is not finite, or of which nothing is left.
    again  whether the token is not valid: the candidates were not enough (see ``Sequence.draw_again``).
    """

    token: int
    logprob: float
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    again: bool = False


@dataclass(frozen=True)
class Choice:
    """Chosen tokens [R] int64 on the device of the logits; ``results`` waits for them and all the host has to know."""

    tokens: Tensor
    results: Callable[[], list[Sampled]]


def choose(logits: Tensor, sequences: list[Sequence]) -> Choice:
    """Choose one token per row of ``logits`` [R, V] float32, which may change once this returned.

    Log-probabilities are those of the model, before anything the request asks for is applied.
    """
    changed = [row for row, sequence in enumerate(sequences) if _changes_logits(sequence)]
    if not changed:
        own = logits[:0]
    else:
        own = logits.index_select(0, on_device(changed, logits.device))
        _apply_changes(own, [sequences[row] for row in changed])
    if _is_native(logits):
        # A row of which nothing is left is drawn as it was, and then fails.
        empty = [at for at, best in enumerate(own.amax(dim=-1).tolist() if changed else ()) if best == float("-inf")]
        if empty:
            own[empty] = logits[[changed[at] for at in empty]]
        results = _sample_natively(logits, changed, own, sequences)
        for at in empty:
            results[changed[at]].error = results[changed[at]].error or NOTHING_LEFT
        return Choice(torch.tensor([result.token for result in results]), lambda: results)
    asked = logits.index_copy(0, on_device(changed, logits.device), own) if changed else logits
    tokens, told = _chosen(logits, asked, sequences)
    arriving = on_host(told)
    # Of the logits themselves nothing is kept: the next step writes over them.
    vocab = logits.shape[1]
    return Choice(tokens, lambda: _read(arriving()[0], sequences, vocab))


def _is_native(logits: Tensor) -> bool:
    return logits.stride(1) == 1 and sampling.implementation(logits.dtype, logits.device) == "cpu"


#: Numbers of every row in what ``_chosen`` tells.
_FIXED = 6


def _read(told: list[float], sequences: list[Sequence], vocab: int) -> list[Sampled]:
    """What ``_chosen`` told, row by row."""
    numbers = iter(told)
    rows = [[next(numbers) for _ in range(_FIXED)] for _ in sequences]
    results = []
    for sequence, (token, logprob, finite, left, complete, rank) in zip(sequences, rows, strict=True):
        count = _top_count(sequence, vocab)
        top = None
        if count is not None:
            ids, values = ([next(numbers) for _ in range(count)] for _ in range(2))
            top = TokenLogprobs([int(token), *map(int, ids)], [logprob, *values], int(rank))
        failure = NOT_FINITE if not finite else NOTHING_LEFT if not left else None
        again = not (failure or complete)
        results.append(Sampled(int(token), logprob, None if failure else top, failure, again))
    return results


def _top_count(sequence: Sequence, vocab: int) -> int | None:
    """How many of the most likely tokens a request wants to see, or None."""
    count = sequence.spec.logprobs
    return vocab if count == -1 else count


def _chosen(raw: Tensor, logits: Tensor, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """Tokens [R] drawn from ``logits``, and what the host has to know of the step, in one tensor float64.

    Of every row _FIXED numbers: token, log-probability, whether the logits are finite, whether the request leaves any
    token, whether the candidates were enough, and the token's rank. Then, for rows that want them, the most likely
    tokens and their log-probabilities.
    """
    device = raw.device
    normalizer = torch.logsumexp(raw, dim=-1)
    tokens = logits.argmax(dim=-1)
    complete = torch.ones_like(tokens, dtype=torch.bool)
    random = [row for row, sequence in enumerate(sequences) if sequence.spec.temperature > 0]
    if random:
        some = on_device(random, device)
        drawn, enough = _draw(logits.index_select(0, some), [sequences[row] for row in random])
        tokens, complete = tokens.index_copy(0, some, drawn), complete.index_copy(0, some, enough)
    of_token = raw.gather(1, tokens.unsqueeze(1))
    ranks = torch.zeros_like(tokens)
    counts = [_top_count(sequence, raw.shape[1]) for sequence in sequences]
    if any(count is not None for count in counts):
        ranks = (raw > of_token).sum(dim=-1) + 1
    left = logits.amax(dim=-1) > float("-inf")
    fixed = (tokens, of_token.squeeze(1) - normalizer, torch.isfinite(normalizer), left, complete, ranks)
    parts = [torch.stack([column.double() for column in fixed], dim=1).flatten()]
    for row, count in enumerate(counts):
        if count is not None:
            values, ids = (raw[row] - normalizer[row]).topk(count)
            parts += [ids.double(), values.double()]
    return tokens, torch.cat(parts)


def _sample_natively(raw: Tensor, changed: list[int], own: Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """The same by the native library, which neither sorts nor copies the rows."""
    vocab = raw.shape[1]
    asked = native.choices(len(sequences))
    at, step = raw.data_ptr(), raw.stride(0) * 4
    for choice, sequence in zip(asked, sequences, strict=True):
        spec = sequence.spec
        choice.logits = choice.raw = at
        at += step
        choice.given = -1
        choice.temperature = spec.temperature
        if spec.temperature > 0:
            choice.uniform = uniform_at(spec.seed, len(sequence.token_ids))
            choice.top_k, choice.top_p, choice.min_p = spec.top_k, spec.top_p, spec.min_p
        if spec.logprobs is not None:
            choice.ranked, choice.count = 1, vocab if spec.logprobs == -1 else min(spec.logprobs, vocab)
    for index, row in enumerate(changed):
        asked[row].logits = own.data_ptr() + index * vocab * 4
    wants_top = any(choice.count for choice in asked)
    ids, values = native.top_buffers(asked) if wants_top else (None, None)
    native.choose(asked, vocab)
    results = []
    at = 0
    for choice, sequence in zip(asked, sequences, strict=True):
        token, logprob, count = choice.token, choice.log_probability, choice.count
        top = None
        if sequence.spec.logprobs is not None:
            top = TokenLogprobs([token], [logprob], choice.rank)
            if ids is not None and values is not None:
                top.token_ids += ids[at : at + count].tolist()
                top.logprobs += values[at : at + count].tolist()
                at += count
        if math.isfinite(choice.normalizer):
            results.append(Sampled(token, logprob, top))
        else:
            results.append(Sampled(token, logprob, error=NOT_FINITE))
    return results


def prompt_logprobs(logits: Tensor, targets: list[int], count: int) -> Callable[[], list[TokenLogprobs]]:
    """Log-probabilities of prompt tokens: row i of ``logits`` [R, V] float32, which may change once this returned,
    predicts ``targets[i]``. The function returned waits for them.
    """
    wanted = logits.shape[1] if count == -1 else count
    if _is_native(logits):
        found = _prompt_logprobs_natively(logits, targets, wanted)
        return lambda: found
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    of_target = logits.gather(1, on_device(targets, logits.device).unsqueeze(1))
    values, ids = (logits - normalizer).topk(wanted, dim=-1)
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


def _masks_stops(sequence: Sequence) -> bool:
    return sequence.num_outputs < sequence.spec.min_tokens


def _changes_logits(sequence: Sequence) -> bool:
    spec = sequence.spec
    return (
        _masks_stops(sequence)
        or spec.presence_penalty != 0
        or spec.frequency_penalty != 0
        or spec.repetition_penalty != 1
        or spec.logit_bias is not None
        or spec.allowed_token_ids is not None
        or bool(spec.bad_words)
        or isinstance(spec, LocalSpec)
    )


def _apply_changes(logits: Tensor, sequences: list[Sequence]) -> None:
    """Penalties, biases and masks, in vLLM's order; modifies ``logits``, a row per sequence.

    Tokens are counted on the host, which knows them: a GPU could not say how many there are without being waited for.
    """
    for values, sequence in zip(logits, sequences, strict=True):
        spec, device = sequence.spec, values.device
        outputs = sequence.token_ids[sequence.num_prompt :]
        if isinstance(spec, LocalSpec):
            for process in spec.logits_processors:
                values.copy_(_processed(process, spec.prompt_token_ids, outputs, values))
        if spec.allowed_token_ids is not None:
            hidden = torch.ones_like(values, dtype=torch.bool)
            hidden.index_fill_(0, on_device(spec.allowed_token_ids, device, torch.long), False)
            values.masked_fill_(hidden, float("-inf"))
        if spec.logit_bias:
            ids = on_device(list(spec.logit_bias), device)
            values[ids] += on_device(list(spec.logit_bias.values()), device)
        banned = _banned(spec.bad_words, outputs)
        if banned:
            values.index_fill_(0, on_device(banned, device, torch.long), float("-inf"))
        if _masks_stops(sequence):
            ends = [*sequence.stop_ids, *sequence.eos_ids]
            values.index_fill_(0, on_device(ends, device, torch.long), float("-inf"))
        if spec.repetition_penalty != 1:
            seen = on_device(sorted(set(sequence.token_ids)), device)
            of_seen = values[seen]
            factor = spec.repetition_penalty
            values[seen] = torch.where(of_seen > 0, of_seen / factor, of_seen * factor)
        counts = Counter(outputs)
        if counts and (spec.frequency_penalty or spec.presence_penalty):
            ids, times = on_device(list(counts), device), on_device(list(counts.values()), device)
            values[ids] -= spec.frequency_penalty * times + spec.presence_penalty


def _processed(process: LogitsProcessor, prompt: list[int], outputs: list[int], values: Tensor) -> Tensor:
    """What a user's function makes of a row; it may or may not want the prompt, as in vLLM."""
    wants_prompt = len(inspect.signature(process).parameters) >= 3
    return process(prompt, outputs, values) if wants_prompt else process(outputs, values)


def _banned(words: list[list[int]], outputs: list[int]) -> list[int]:
    """Tokens that would complete one of ``words``."""
    return [word[-1] for word in words if len(word) == 1 or outputs[-(len(word) - 1) :] == word[:-1]]


def _draw(logits: Tensor, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """Random tokens [R] for rows with a temperature, by inverting the cumulative distribution; and [R] bool, whether
    the candidates were enough.
    """
    device = logits.device
    specs = [sequence.spec for sequence in sequences]
    uniform = on_device([[uniform_at(s.spec.seed, len(s.token_ids))] for s in sequences], device, torch.float64)
    scaled = logits / on_device([[spec.temperature] for spec in specs], device, logits.dtype)
    tokens = torch.empty(len(specs), dtype=torch.long, device=device)
    complete = torch.ones_like(tokens, dtype=torch.bool)
    cut = [spec.top_k > 0 or spec.top_p < 1 or spec.min_p > 0 for spec in specs]
    if not all(cut):
        plain = on_device([row for row, is_cut in enumerate(cut) if not is_cut], device)
        weights = torch.softmax(scaled.index_select(0, plain), dim=-1).double()
        tokens.index_copy_(0, plain, _invert(weights, uniform.index_select(0, plain)))
    for from_all in (False, True):
        rows = [row for row, is_cut in enumerate(cut) if is_cut and sequences[row].draws_from_all == from_all]
        if rows:
            some = on_device(rows, device)
            parts = scaled.index_select(0, some), uniform.index_select(0, some), [specs[row] for row in rows]
            vocab = logits.shape[1]
            drawn, enough = _draw_filtered(*parts, vocab if from_all else min(CANDIDATES, vocab))
            tokens.index_copy_(0, some, drawn)
            complete.index_copy_(0, some, enough)
    return tokens, complete


def _draw_filtered(scaled: Tensor, uniform: Tensor, specs: list[RequestSpec], candidates: int) -> tuple[Tensor, Tensor]:
    """Random tokens [R] among those that min-p, top-k and top-p leave; the second result as of ``_draw``."""
    vocab = scaled.shape[1]
    normalizer = torch.logsumexp(scaled, dim=-1, keepdim=True)
    if candidates < vocab:
        values, ids = _in_order(*scaled.topk(candidates, dim=-1))
    else:
        values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    weights, complete = _kept_weights(values, normalizer, specs, vocab)
    return ids.gather(1, _invert(weights, uniform).unsqueeze(1)).squeeze(1), complete


def _in_order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates best first, the first token of equal ones first; topk leaves that open."""
    ids, order = ids.sort(dim=-1)
    values, best = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, best)


def _kept_weights(values: Tensor, normalizer: Tensor, specs: list[RequestSpec], vocab: int) -> tuple[Tensor, Tensor]:
    """Probabilities of candidates ``values`` [R, C], best first, with 0 where cut off; and whether C was enough."""
    device = values.device
    width = values.shape[1]
    top_k = on_device([[min(spec.top_k or vocab, vocab)] for spec in specs], device)
    top_p = on_device([[spec.top_p] for spec in specs], device, torch.float64)
    min_p = on_device([[spec.min_p] for spec in specs], device, torch.float64)
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
