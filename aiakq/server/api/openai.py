"""Response fields shared by completions and chat completions of the OpenAI API.

Two fields extend OpenAI's. Every choice has ``sentence_length``, the number of characters of its generated text, and
``cum_log_probs``, the sum of the log-probabilities of its generated tokens before temperature and penalties. With a
single choice, both are also at the top level. In a stream, they are in the chunk with the finish_reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

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


ChoiceT = TypeVar("ChoiceT")


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


class GenerationChunk(msgspec.Struct, Generic[ChoiceT], kw_only=True):
    """One event of a stream. With include_usage, ``usage`` is null in all chunks but the last."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChoiceT]
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


class OpenAIResponseBuilder(ResponseBuilder):
    """Builds responses with choices and usage. Subclasses for completions and chat build the choices."""

    end_of_stream = b"data: [DONE]\n\n"
    request: GenerationRequest
    response_type: type[GenerationResponse[Any]]
    chunk_type: type[GenerationChunk[Any]]

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

    def response_fields(self, outputs: Sequence[Delta]) -> dict[str, Any]:
        """Return additional fields of a complete response."""
        return {}

    def chunk_fields(self) -> dict[str, Any]:
        """Return additional fields of the next chunk."""
        return {}

    def choice(self, state: ChoiceState, output: Delta, totals: Mapping[str, object]) -> Any:
        """Return one entry of ``choices`` in a complete response."""
        raise NotImplementedError

    def chunk_choices(self, state: ChoiceState, delta: Delta, totals: Mapping[str, object]) -> list[Any]:
        """Return entries of ``choices`` in a stream, each for a separate chunk. ``totals`` is empty before the last."""
        raise NotImplementedError

    # --- responses and streams

    def response(self, outputs: Sequence[Delta]) -> msgspec.Struct:
        choices = []
        for state, output in zip(self.states, outputs, strict=True):
            self._update(state, output)
            choices.append(self.choice(state, output, self._totals(state, output)))
        totals = self._totals(self.states[0], outputs[0]) if len(choices) == 1 else {}
        fields = totals | self._timings() | self.response_fields(outputs)
        return self.response_type(**self._head(), choices=choices, usage=self.usage(), **fields)

    def chunks(self, deltas: RequestDeltas) -> Sequence[msgspec.Struct]:
        chunks = []
        for prompt_index, delta in deltas:
            state = self.states[prompt_index * self.params.n + delta.index]
            usage_before = self.usage()
            self._update(state, delta)
            totals = self._totals(state, delta) if delta.finish_reason is not None else {}
            choices = self.chunk_choices(state, delta, totals)
            for choice in choices:
                last = choice is choices[-1]
                usage: Usage | None | msgspec.UnsetType = msgspec.UNSET
                if self.continuous_usage:
                    # The first chunk of a message has no tokens.
                    usage = self.usage() if last else usage_before
                elif self.include_usage:
                    usage = None
                fields = self.chunk_fields() | (totals if len(self.states) == 1 and last else {})
                chunks.append(self.chunk_type(**self._head(), choices=[choice], usage=usage, **fields))
        return chunks

    def final_chunks(self) -> Sequence[msgspec.Struct]:
        """Return the chunk with the token counts, if requested."""
        if not self.include_usage:
            return []
        return [self.chunk_type(**self._head(), choices=[], usage=self.usage(), **self._timings())]

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

    def finish(self, delta: Delta) -> dict[str, Any]:
        """Return the fields about the end of a choice."""
        reason = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return reason if delta.finish_reason is None else {**reason, "matched_stop": matched_stop(delta)}

    def token_ids(self, delta: Delta) -> dict[str, Any]:
        """Return the field with the generated token ids, if requested."""
        return {"token_ids": delta.token_ids} if self.return_token_ids else {}

    def prompt_token_ids(self, prompt: Prompt) -> dict[str, object]:
        """Return the field with the token ids of a prompt, if requested."""
        return {"prompt_token_ids": prompt.token_ids} if self.return_token_ids else {}

    def prompt_logprobs(self, output: Delta) -> PromptLogprobs | None:
        """Return the field ``prompt_logprobs``, or None if not requested."""
        return None if self.request.prompt_logprobs is None else format_prompt_logprobs(output.prompt_logprobs)

    def _head(self) -> dict[str, Any]:
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

    def _timings(self) -> dict[str, Any]:
        """Return the field with the times of the request, if the server returns them."""
        if not self.service.options.per_request_metrics or len(self.states) > 1:
            return {}
        return {"metrics": self.states[0].timings or RequestTimings()}

    def _totals(self, state: ChoiceState, delta: Delta) -> dict[str, Any]:
        """Return the two fields that extend OpenAI's."""
        return {"sentence_length": state.text_length, "cum_log_probs": finite(delta.cumulative_logprob)}


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
