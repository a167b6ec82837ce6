"""Admission: checks requests against the limits of the model, so that none of their values can make the engine fail."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import msgspec

from aiakq.errors import error
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.media import MediaItem
from aiakq.runtime.protocol.parameter import request_error
from aiakq.runtime.protocol.request import DEFAULT_OPTIONS, PRIORITY, RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams


def admit(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    limits: ModelLimits,
    index: int = 0,
    bad_word_ids: Sequence[list[int]] = (),
    options: RequestOptions = DEFAULT_OPTIONS,
    within_context: bool = False,
    media: tuple[MediaItem, ...] = (),
) -> RequestSpec:
    """Validate a request against ``limits`` and create its ``RequestSpec``.

    index           index of the sequence in a request with n > 1.
    bad_word_ids    token ids of ``params.bad_words``.
    within_context  reduce a ``max_tokens`` that exceeds the context length, instead of refusing it.
    media           images of the prompt.

    Raises AiakqError: empty_prompt, invalid_token_id, context_length_exceeded, value_out_of_range, invalid_type,
    unsupported_parameter, task_mismatch, media_refused.
    """
    limits.check_task(options, prompt_token_ids)
    if not prompt_token_ids:
        raise error("empty_prompt", param="prompt")
    _check_ids("prompt", prompt_token_ids, limits.vocab_size)
    _check_ids_of_parameters(params, bad_word_ids, limits.vocab_size)
    _check_priority(options.priority, limits)
    _check_logprobs(params, limits)
    if limits.speech is not None:
        limits.speech.check(media)
    elif media:
        limits.media.check(media, len(prompt_token_ids))
    longest = limits.longest
    max_new_tokens = longest - len(prompt_token_ids)
    max_tokens = max_new_tokens if params.max_tokens is None else params.max_tokens
    if limits.max_new_tokens is not None:
        max_tokens = min(max_tokens, limits.max_new_tokens)
        if params.min_tokens > max_tokens:
            allowed = f"at most {max_tokens}, the limit of every answer"
            raise error("value_out_of_range", param="min_tokens", value=params.min_tokens, allowed=allowed)
    if within_context and max_new_tokens > 0:
        max_tokens = min(max_tokens, max_new_tokens)
    if max_new_tokens < max(0 if params.max_tokens == 0 else 1, max_tokens):
        wanted = max(int(limits.generates), max_tokens)
        param = "max_tokens" if max_new_tokens > 0 else "prompt"
        kind = next((item.kind for item in media if item.places), None)
        raise limits.too_long(param, len(prompt_token_ids), wanted, kind)
    return RequestSpec(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        sampling=params.as_record(),
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if params.seed is None else params.seed + index,
        eos_token_ids=[] if params.ignore_eos else list(limits.eos_token_ids),
        bad_word_ids=list(bad_word_ids),
        options=options,
        grammar=None if params.grammar is None else limits.grammars.apply(params.grammar),
        media=media,
        is_short=limits.short_context is not None and len(prompt_token_ids) + max_tokens <= limits.short_context,
    )


def repeat(spec: RequestSpec, request_id: str, index: int) -> RequestSpec:
    """Return sequence ``index`` of a request whose first sequence is ``spec``, with its own seed. Lists are shared."""
    seed = secrets.randbits(63) if spec.sampling.seed is None else spec.seed + index
    return msgspec.structs.replace(spec, request_id=request_id, seed=seed)


def _check_logprobs(params: SamplingParams, limits: ModelLimits) -> None:
    if params.logprob_token_ids is not None and params.max_tokens == 0:
        reason = "it is about generated tokens, of which max_tokens=0 leaves none"
        raise error("unsupported_parameter", param="logprob_token_ids", reason=reason)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        # -1 means the whole vocabulary.
        if count is not None and (limits.vocab_size if count == -1 else count) > limits.max_logprobs:
            raise error("value_out_of_range", param=name, value=count, allowed=f"at most {limits.max_logprobs}")


def _check_priority(priority: int, limits: ModelLimits) -> None:
    if type(priority) is int and priority == 0:
        return
    refused = PRIORITY.refusal(priority)
    if refused is not None:
        raise request_error("priority", refused)
    if priority and not limits.by_priority:
        reason = "requests are served in order of arrival, without --scheduling-policy priority"
        raise error("unsupported_parameter", param="priority", reason=reason)


def _check_ids_of_parameters(params: SamplingParams, bad_word_ids: Sequence[list[int]], vocab_size: int) -> None:
    _check_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_ids("logprob_token_ids", params.logprob_token_ids or (), vocab_size)
    ascending = params.allowed_token_ids or []  # may be the whole vocabulary, so only the extremes are checked
    _check_ids("allowed_token_ids", ascending[:1] + ascending[-1:], vocab_size)
    _check_ids("logit_bias", params.logit_bias or (), vocab_size)
    for word in bad_word_ids:
        _check_ids("bad_words", word, vocab_size)


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise error("invalid_type", param=param, reason=f"token ids are integers, not {token!r:.64}")
        if not 0 <= token < vocab_size:
            raise error("invalid_token_id", param=param, value=token, last=vocab_size - 1)
