"""Response fields shared by completions and chat completions of the OpenAI API.

Two fields extend OpenAI's. Every choice has ``sentence_length``, the number of characters of its generated text, and
``cum_log_probs``, the sum of the log-probabilities of its generated tokens before temperature and penalties. With a
single choice, both are also at the top level. In a stream, they are in the chunk with the finish_reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypedDict, TypeVar, cast

import msgspec

from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.request_output import Logprob, PositionLogprobs
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.api.generation import ResponseBuilder
from aiakq.server.api.generation_request import GenerationRequest
from aiakq.server.api.request_timings import RequestTimings
from aiakq.server.api.service import Service
from aiakq.server.api.text_offsets import TextOffsets
from aiakq.server.process.request_stream import RequestDeltas

#: OpenAI's log-probability of impossible tokens, because JSON has no infinity.
LOWEST_LOGPROB = -9999.0
FinishReason = Literal["stop", "length", "tool_calls", "repetition"]


class PromptTokensDetails(msgspec.Struct):
    """``cached_tokens`` is the number of prompt tokens found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """``reasoning_tokens`` is the number of tokens before the answer; 0 without a reasoning parser."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts. A prompt is counted once, whatever ``n``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(msgspec.Struct):
    """A token at a position of the prompt, as in vLLM."""

    logprob: float
    rank: int | None
    decoded_token: str | None


#: Per position of the prompt, token id -> log-probability; the first position has none.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Choice(msgspec.Struct, kw_only=True):
    """One generated text or message. Subclasses add their fields without ``kw_only``, so that these come last.

    Fields that were not requested are null, not absent, because clients read them as attributes.
    """

    finish_reason: FinishReason
    stop_reason: int | str | None
    matched_stop: int | str | None = None
    token_ids: list[int] | None = None
    sentence_length: int
    cum_log_probs: float


class ChunkChoice(msgspec.Struct, kw_only=True):
    """Increment of a choice in one event of a stream; for subclasses, see ``Choice``.

    The opening event of a message has no ``stop_reason``; only the event with the finish_reason has ``matched_stop``
    and the totals.
    """

    finish_reason: FinishReason | None
    stop_reason: int | str | None | msgspec.UnsetType = msgspec.UNSET
    matched_stop: int | str | None | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    sentence_length: int | msgspec.UnsetType = msgspec.UNSET
    cum_log_probs: float | msgspec.UnsetType = msgspec.UNSET


ChoiceT = TypeVar("ChoiceT", bound=Choice)
ChunkChoiceT = TypeVar("ChunkChoiceT", bound=ChunkChoice)


class GenerationResponse(msgspec.Struct, Generic[ChoiceT], kw_only=True):
    """A complete response. ``sentence_length`` and ``cum_log_probs`` are those of a single choice."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChoiceT]
    usage: Usage
    metrics: RequestTimings | msgspec.UnsetType = msgspec.UNSET
    sentence_length: int | msgspec.UnsetType = msgspec.UNSET
    cum_log_probs: float | msgspec.UnsetType = msgspec.UNSET


class GenerationChunk(msgspec.Struct, Generic[ChunkChoiceT], kw_only=True):
    """One event of a stream. With include_usage, ``usage`` is null in all chunks but the last."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoiceT]
    usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
    metrics: RequestTimings | msgspec.UnsetType = msgspec.UNSET
    sentence_length: int | msgspec.UnsetType = msgspec.UNSET
    cum_log_probs: float | msgspec.UnsetType = msgspec.UNSET


@dataclass
class ChoiceState:
    """State of one choice.

    offsets  text offsets of its tokens, including an echoed prompt.
    """

    index: int
    prompt: Prompt
    started: bool = False
    finish_reason: str | None = None
    num_tokens: int = 0
    num_cached_tokens: int = 0
    text_length: int = 0
    timings: RequestTimings | None = None
    offsets: TextOffsets = field(default_factory=lambda: TextOffsets())


class Head(TypedDict):
    """The fields that all events of a response begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class OpenAIResponseBuilder(ResponseBuilder, Generic[ChoiceT, ChunkChoiceT]):
    """Builds responses with choices and usage. Subclasses for completions and chat build the choices."""

    end_of_stream = b"data: [DONE]\n\n"
    request: GenerationRequest

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
    ) -> None:
        super().__init__(service, request, request_id, prompts, params)
        # Without a tokenizer there are only ids.
        self.return_token_ids = bool(request.return_token_ids) or not service.renderer.tokenizer.has_text
        self.tokens_as_ids = self._asks_for_tokens_as_ids() or not service.renderer.tokenizer.has_text
        options = request.stream_options
        self.include_usage = bool(options and options.include_usage) or service.options.force_include_usage
        continuous = service.options.force_include_usage or bool(options and options.continuous_usage_stats)
        self.continuous_usage = self.include_usage and continuous
        self.created = int(time.time())
        self.states = [ChoiceState(index, prompts[index // params.n]) for index in range(len(prompts) * params.n)]

    def _asks_for_tokens_as_ids(self) -> bool:
        asked = self.request.return_tokens_as_token_ids
        return self.service.options.return_tokens_as_token_ids if asked is None else asked

    # --- supplied by subclasses

    def complete(self, choices: list[ChoiceT], outputs: Sequence[Delta]) -> GenerationResponse[ChoiceT]:
        """Return the complete response."""
        raise NotImplementedError

    def chunk(
        self, choices: list[ChunkChoiceT], usage: Usage | None | msgspec.UnsetType
    ) -> GenerationChunk[ChunkChoiceT]:
        """Return the next event of a stream."""
        raise NotImplementedError

    def choice(self, state: ChoiceState, output: Delta) -> ChoiceT:
        """Return one entry of ``choices`` in a complete response."""
        raise NotImplementedError

    def chunk_choices(self, state: ChoiceState, delta: Delta) -> list[ChunkChoiceT]:
        """Return entries of ``choices`` in a stream, each for a separate chunk. The last one has the end, if any."""
        raise NotImplementedError

    # --- responses and streams

    def response(self, outputs: Sequence[Delta]) -> msgspec.Struct:
        choices = []
        for state, output in zip(self.states, outputs, strict=True):
            self._update(state, output)
            choices.append(self.choice(state, output))
        response = self.complete(choices, outputs)
        response.metrics = self._timings()
        if len(choices) == 1:
            response.sentence_length, response.cum_log_probs = choices[0].sentence_length, choices[0].cum_log_probs
        return response

    def chunks(self, deltas: RequestDeltas) -> Sequence[msgspec.Struct]:
        chunks = []
        for prompt_index, delta in deltas:
            state = self.states[prompt_index * self.params.n + delta.index]
            usage_before = self.usage()
            self._update(state, delta)
            choices = self.chunk_choices(state, delta)
            for choice in choices:
                last = choice is choices[-1]
                usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
                if self.continuous_usage:
                    # The first chunk of a message has no tokens.
                    usage = self.usage() if last else usage_before
                elif self.include_usage:
                    usage = None
                chunk = self.chunk([choice], usage)
                if last and delta.finish_reason is not None:
                    choice.matched_stop = matched_stop(delta)
                    choice.sentence_length, choice.cum_log_probs = state.text_length, finite(delta.cumulative_logprob)
                    if len(self.states) == 1:
                        chunk.sentence_length, chunk.cum_log_probs = choice.sentence_length, choice.cum_log_probs
                chunks.append(chunk)
        return chunks

    def final_chunks(self) -> Sequence[msgspec.Struct]:
        """Return the chunk with the token counts, if requested."""
        if not self.include_usage:
            return []
        chunk = self.chunk([], self.usage())
        chunk.metrics = self._timings()
        return [chunk]

    # --- parts

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the number of reasoning tokens so far."""
        return 0

    @property
    def finish_reason(self) -> str:
        """Return "length" if any choice reached its token limit, else "stop"."""
        return "length" if any(state.finish_reason == "length" for state in self.states) else "stop"

    def usage(self) -> Usage:
        """Return the token counts so far."""
        prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion = sum(state.num_tokens for state in self.states)
        cached = sum(state.num_cached_tokens for state in self.states[:: self.params.n])
        details = PromptTokensDetails(cached) if self.service.options.prompt_tokens_details else None
        return Usage(
            prompt, completion, prompt + completion, details, CompletionTokensDetails(self.num_reasoning_tokens)
        )

    def token_text(self, token_id: int, entry: Logprob | None = None) -> str:
        """Return the representation of a token in lists of log-probabilities."""
        if self.tokens_as_ids:
            return f"token_id:{token_id}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self.service.renderer.tokenizer.token_text(token_id)

    def bytes_in_text(self, token_id: int) -> bytes:
        """Return the bytes that a generated token adds to the text."""
        tokenizer = self.service.renderer.tokenizer
        kept = token_id not in tokenizer.special_ids or token_id in self.kept_special_tokens
        return tokenizer.token_bytes(token_id) if kept or not self.params.skip_special_tokens else b""

    def end_of(self, delta: Delta) -> FinishReason:
        """Return why a choice has ended."""
        return cast(FinishReason, delta.finish_reason)

    def prompt_logprobs(self, output: Delta) -> PromptLogprobs | None:
        """Return the field ``prompt_logprobs``, or None if not requested."""
        return None if self.request.prompt_logprobs is None else format_prompt_logprobs(output.prompt_logprobs)

    def head(self) -> Head:
        """Return the first fields of a response or a chunk."""
        return {
            "id": self.id,
            "created": self.created,
            "model": self.service.model.shown_name(self.request.model),
            "system_fingerprint": self.service.model.fingerprint,
        }

    def _update(self, state: ChoiceState, delta: Delta) -> None:
        state.num_tokens += len(delta.token_ids)
        state.num_cached_tokens = max(state.num_cached_tokens, delta.num_cached_tokens)
        state.text_length += len(delta.text)
        state.finish_reason = delta.finish_reason or state.finish_reason
        if delta.finish_reason is not None:
            state.timings = RequestTimings.of(delta.times, state.num_tokens)

    def _timings(self) -> RequestTimings | msgspec.UnsetType:
        """Return the times of the request, if the server returns them."""
        if not self.service.options.per_request_metrics or len(self.states) > 1:
            return msgspec.UNSET
        return self.states[0].timings or RequestTimings()


def matched_stop(delta: Delta) -> int | str | None:
    """Return SGLang's field: the stop string or token id, including end of sequence, that ended a text."""
    if delta.finish_reason != "stop" or delta.stop_reason is not None:
        return delta.stop_reason
    return delta.token_ids[-1] if delta.token_ids else None


def finite(logprob: float) -> float:
    """Return ``logprob``, or ``LOWEST_LOGPROB`` if JSON cannot represent it."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def top_by_rank(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    """Return the ``count`` most likely tokens of a position, best first; all that have a rank if it is -1."""
    last = math.inf if count == -1 else count
    ranked = [(token, entry) for token, entry in position.items() if entry.rank is not None and entry.rank <= last]
    return sorted(ranked, key=lambda item: item[1].rank or 0)


def format_prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> PromptLogprobs | None:
    """Return the field ``prompt_logprobs``, encoded position by position so that no long call blocks the server."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else encoded(
            {
                str(token): PromptLogprob(finite(entry.logprob), entry.rank, entry.decoded_token)
                for token, entry in position.items()
            }
        )
        for position in positions
    ]


def encoded(value: Any) -> Any:
    """Return ``value`` as raw JSON for the response."""
    return msgspec.Raw(msgspec.json.encode(value))
