"""Messages to and from the engine: plain records that are encoded without pickle.

Requests enter the engine as ``RequestSpec``, which only ``admit`` creates: it validates every field against the limits
of the loaded model, so that the values of a request cannot make the engine fail.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from aiakq.errors import error
from aiakq.runtime.engine.adapters import AdapterLimits, AdapterRef
from aiakq.runtime.pooling_params import Pooled, Pooling, PoolingLimits
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.speculation.speculation import DraftCounts
from aiakq.runtime.structured.grammars import Grammar, GrammarDefaults
from aiakq.runtime.thought_budget import ThoughtBudget

#: The ``error`` of a sequence whose logits are not finite.
NOT_FINITE = "the model's output is not finite (overflow)"
#: The ``error`` of a sequence whose masks forbid every token.
NOTHING_LEFT = "no token is left that the request allows"
#: The ``error`` of a sequence whose grammar matcher has failed.
GRAMMAR_FAILED = "its grammar cannot be followed any further"
#: Prefix of the ``error`` of a sequence whose LoRA adapter could not be loaded.
ADAPTER_FAILED = "its adapter cannot be loaded"
#: The ``error`` of a sequence whose chunk exceeds the memory even in a step of its own.
OUT_OF_MEMORY = "its part of a step does not fit into memory"


@dataclass(frozen=True)
class ModelLimits:
    """The limits that every request is validated against.

    vocab_size      width of the logits: every token id is in 0 .. vocab_size - 1.
    max_model_len   maximum number of tokens of prompt plus output.
    max_kv_tokens   number of tokens that the whole page pool holds; a longer request could never run.
    max_logprobs    maximum number of log-probabilities per position.
    eos_token_ids   token ids that end a sequence.
    max_new_tokens  limit on the number of generated tokens of every request; None for no limit.
    by_priority     whether requests may have a priority.
    grammars        defaults of structured output.
    pooling         how prompts are pooled; None for a model that generates text.
    adapters        limits on LoRA adapters; None if LoRA is disabled.
    """

    vocab_size: int
    max_model_len: int
    max_kv_tokens: int
    max_logprobs: int = 20
    eos_token_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None
    by_priority: bool = False
    grammars: GrammarDefaults = GrammarDefaults()
    pooling: PoolingLimits | None = None
    adapters: AdapterLimits | None = None

    @property
    def task(self) -> str:
        """The model's task: generate, embed, classify, score or reward."""
        return "generate" if self.pooling is None else self.pooling.task

    def check_generates(self) -> None:
        """Raise ``task_mismatch`` if the model pools prompts instead of generating text."""
        if self.pooling is not None:
            raise error("task_mismatch", task=self.task, wanted="continue texts", needed="generate")

    def pools(self) -> PoolingLimits:
        """Return how prompts are pooled. Raises ``task_mismatch`` for a model that generates text."""
        if self.pooling is None:
            raise error(
                "task_mismatch", task="generate", wanted="return embeddings or scores", needed="embed or classify"
            )
        return self.pooling


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client asks for besides its prompts and sampling parameters. The record travels from the route to the
    engine.

    priority    scheduling priority; smaller values are scheduled first.
    cache_salt  prefix cache pages are shared only between requests with the same salt.
    client      client that the request belongs to; steps are shared between clients (``StepBuilder``).
    pooling     how prompts are pooled, for requests that generate nothing.
    adapter     LoRA adapter; validated by ``runtime.lora.requests``.
    """

    priority: int = 0
    cache_salt: str = ""
    client: str = ""
    pooling: Pooling | None = None
    adapter: AdapterRef | None = None


DEFAULT_OPTIONS = RequestOptions()


class RequestSpec(msgspec.Struct, frozen=True):
    """One sequence to generate or pool, with validated fields. Created by ``admit`` only.

    sampling         sampling parameters of the request, without ``logits_processors``, which cannot be encoded, and
                     without structured outputs, which ``grammar`` replaces.
    max_tokens       maximum number of tokens to generate; 0 only scores the prompt.
    seed             seed of the sequence: the request's plus the index of the sequence, or a random one. It is fixed,
                     so that a preempted sequence is regenerated identically.
    eos_token_ids    token ids that end the sequence with ``stop_reason`` None; empty with ignore_eos.
    bad_word_ids     ``sampling.bad_words`` as sequences of token ids that must not occur in the output.
    options          what the client asks for, the same for all sequences of a request.
    grammar          grammar that the generated text has to match.
    thought          the longest thought, and how it is ended.
    group            the same for all sequences of a request, and for no other request; "" if it has only one.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: list[int] = []
    bad_word_ids: list[list[int]] = []
    options: RequestOptions = DEFAULT_OPTIONS
    grammar: Grammar | None = None
    thought: ThoughtBudget | None = None
    group: str = ""


def admit(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    limits: ModelLimits,
    index: int = 0,
    bad_word_ids: Sequence[list[int]] = (),
    options: RequestOptions = DEFAULT_OPTIONS,
    within_context: bool = False,
) -> RequestSpec:
    """Validate a request against ``limits`` and create its ``RequestSpec``.

    index           index of the sequence in a request with n > 1.
    bad_word_ids    token ids of ``params.bad_words``.
    within_context  reduce a ``max_tokens`` that exceeds the context length, instead of refusing it.

    Raises AiakqError: empty_prompt, invalid_token_id, context_length_exceeded, value_out_of_range, invalid_type,
    unsupported_parameter, task_mismatch.
    """
    _check_prompt(prompt_token_ids, limits, options.pooling)
    _check_ids_of_parameters(params, bad_word_ids, limits.vocab_size)
    _check_priority(options.priority, limits)
    _check_logprobs(params, limits)
    longest = min(limits.max_model_len, limits.max_kv_tokens)
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
        raise error(
            "context_length_exceeded",
            param="max_tokens" if max_new_tokens > 0 else "prompt",
            prompt=len(prompt_token_ids),
            wanted=max(1 if options.pooling is None else 0, max_tokens),
            limit=longest,
        )
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
    )


def repeat(spec: RequestSpec, request_id: str, index: int) -> RequestSpec:
    """Return sequence ``index`` of a request whose first sequence is ``spec``, with its own seed. Lists are shared."""
    seed = secrets.randbits(63) if spec.sampling.seed is None else spec.seed + index
    return msgspec.structs.replace(spec, request_id=request_id, seed=seed)


def _check_logprobs(params: SamplingParams, limits: ModelLimits) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        # -1 means the whole vocabulary.
        if count is not None and (limits.vocab_size if count == -1 else count) > limits.max_logprobs:
            raise error("value_out_of_range", param=name, value=count, allowed=f"at most {limits.max_logprobs}")


def _check_prompt(token_ids: list[int], limits: ModelLimits, pooling: Pooling | None) -> None:
    if pooling is None:
        limits.check_generates()
    else:
        limits.pools().check_rows(pooling.num_rows(token_ids), "prompt")
    if not token_ids:
        raise error("empty_prompt", param="prompt")
    _check_ids("prompt", token_ids, limits.vocab_size)


def _check_priority(priority: int, limits: ModelLimits) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise error("invalid_type", param="priority", reason=f"an integer is expected, not {priority!r:.64}")
    if not -(2**31) <= priority < 2**31:
        raise error("value_out_of_range", param="priority", value=priority, allowed="a 32-bit integer")
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


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Abort requests and free their pages; unknown and finished ids are ignored."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Clear the prefix cache: later requests reuse no pages filled before."""


class EnableDrafts(msgspec.Struct, frozen=True, tag="enable_drafts"):
    """Propose draft tokens from now on, or propose none, to measure what they bring. Proposers start anew, and know no
    outputs of earlier requests.
    """

    enabled: bool


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Unload the adapter with this key as soon as no request uses it."""

    key: str


class AdapterStaged(msgspec.Struct, frozen=True, tag="adapter_staged"):
    """The executor has read the adapter with this key, or has failed to: a step can load it without reading files."""

    key: str


#: What ``Engine.step`` does besides running requests.
Command = Abort | ResetPrefixCache | EnableDrafts | UnloadAdapter | AdapterStaged
#: New requests, and commands, in order.
Inbox = list[RequestSpec | Command]


class TokenLogprobs(msgspec.Struct):
    """Log-probabilities at one position: the chosen token first, then the most likely ones, best first.

    is_ranked  false: the others are those of ``logprob_token_ids``.
    """

    token_ids: list[int]
    logprobs: list[float]
    chosen_rank: int
    is_ranked: bool = True


@dataclass
class RequestTimes:
    """Seconds on the engine's clock (the ``now`` passed to step)."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass
class TokenOutput:
    """The output of a step for one request.

    token_ids          tokens generated in this step.
    token_logprobs     raw log-probabilities of these tokens (before temperature and penalties).
    logprobs           log-probabilities per generated token, if requested.
    prompt_logprobs    log-probabilities of the whole prompt, with the first output if requested; its first entry is
                       None.
    finish_reason      "stop", "length", "abort" or "error" with the last output, else None.
    stop_reason        the stop token id that ended the sequence, or "repetition_detected"; None for an EOS token.
    num_cached_tokens  number of prompt tokens taken from the prefix cache.
    num_preemptions    number of times the sequence was preempted.
    times              timestamps of the request.
    error              why the sequence failed, with finish_reason "error".
    pooled             the pooled prompt, with the last output.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    times: RequestTimes | None = None
    error: str | None = None
    pooled: Pooled | None = None


@dataclass
class EngineStats:
    """Statistics of the engine after a step: current gauges, and counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_scheduled_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    num_clients: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def kv_usage(self) -> float:
        """The fraction of KV cache pages in use, between 0 and 1."""
        return 1 - self.num_free_pages / self.num_pages if self.num_pages else 0.0

    def __add__(self, other: EngineStats) -> EngineStats:
        """Return the sum of the statistics of two engines."""
        return EngineStats(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class StepOutput:
    """The result of one ``Engine.step``."""

    outputs: list[TokenOutput] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)

    def date(self, began: float, ended: float) -> None:
        """Set the times of new tokens to the end of the step; the engine has no clock and recorded its start."""
        for output in self.outputs:
            if output.times is not None and (output.token_ids or output.pooled is not None):
                output.times.last_token = ended
                if output.times.first_token == began:
                    output.times.first_token = ended
