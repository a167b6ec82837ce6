"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from aiakq.errors import error
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta
from aiakq.runtime.text.outputs import PositionLogprobs
from aiakq.server.api.generation import generate
from aiakq.server.api.openai import (
    ChoiceState,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    GenerationResponse,
    OpenAIResponseBuilder,
    PromptLogprobs,
    finite,
)
from aiakq.server.api.routes import GENERATION, TOKENIZATION, UNAVAILABLE, Route
from aiakq.server.api.service import Service
from aiakq.server.process.request_stream import MAX_PROMPTS, Prompt, check_sequence_count

_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)] = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists."
    )
    echo: bool | None = Field(None, description="Return the prompt before the text, in log-probabilities too.")

    def sampling_values(self) -> dict[str, Any]:
        """With ``echo``, ``logprobs`` are also those of the prompt."""
        values = super().sampling_values()
        if self.echo and self.logprobs is not None:
            values.setdefault("prompt_logprobs", self.logprobs)
        return values

    async def tokenize(self, service: Service, params: SamplingParams) -> list[Prompt]:
        """The tokenized prompts. Raises empty_prompt, invalid_type, too_many_prompts."""
        prompts = split_prompts(self.prompt)
        check_sequence_count(len(prompts), params)  # before any of them is tokenized
        return await service.tokenize_prompts(prompts, self.add_special_tokens is not False)


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts, each as text or token ids, of the four forms of the field. ``admit`` checks the ids themselves."""
    if isinstance(prompt, str):
        return [prompt]
    expected = "a string, a list of strings, a list of token ids, or a list of such lists is expected"
    if not isinstance(prompt, list):
        raise error("invalid_type", param="prompt", reason=expected)
    if not prompt:
        raise error("empty_prompt", param="prompt")
    if type(prompt[0]) is int:
        return [prompt]
    if not (all(isinstance(entry, str) for entry in prompt) or all(isinstance(entry, list) for entry in prompt)):
        raise error("invalid_type", param="prompt", reason=expected)
    return prompt


class CompletionLogprobs(msgspec.Struct):
    """OpenAI's four parallel lists, one entry per token.

    An entry of ``top_logprobs`` holds the chosen token and the most likely ones. Two tokens with the same text (parts
    of a character) share a key; ``return_tokens_as_token_ids`` keeps them apart.
    """

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One generated text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | None | msgspec.UnsetType = msgspec.UNSET
    sentence_length: int
    cum_log_probs: float


class CompletionChunkChoice(msgspec.Struct, kw_only=True):
    """What was added to a text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    sentence_length: int | msgspec.UnsetType = msgspec.UNSET
    cum_log_probs: float | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(GenerationResponse[CompletionChoice], kw_only=True):
    """The whole response."""

    object: Literal["text_completion"] = "text_completion"


class CompletionChunk(GenerationChunk[CompletionChunkChoice], kw_only=True):
    """One event of a stream."""

    object: Literal["text_completion"] = "text_completion"


class CompletionResponseBuilder(OpenAIResponseBuilder):
    """Builds responses of /v1/completions. With ``echo`` every choice starts with its prompt."""

    id_prefix = "cmpl-"
    request: CompletionRequest
    response_type = CompletionResponse
    chunk_type = CompletionChunk

    def choice(self, state: ChoiceState, output: Delta, totals: Mapping[str, Any]) -> CompletionChoice:
        fields = self._fields(state, output)
        return CompletionChoice(**fields, prompt_logprobs=self.prompt_logprobs(output), **totals)

    def chunk_choices(self, state: ChoiceState, delta: Delta, totals: Mapping[str, Any]) -> list[CompletionChunkChoice]:
        return [CompletionChunkChoice(**self._fields(state, delta), **totals)]

    def _fields(self, state: ChoiceState, delta: Delta) -> dict[str, Any]:
        """What a choice and a chunk of one have in common."""
        first, state.started = not state.started, True
        echo = bool(first and self.request.echo)
        return {
            "index": state.index,
            "text": (self._prompt_text(state) if echo else "") + delta.text,
            "logprobs": self._logprobs(state, delta, with_prompt=echo),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self.token_ids(state, delta, first),
        }

    def _prompt_text(self, state: ChoiceState) -> str:
        if state.prompt.text is not None:
            return state.prompt.text
        return self.service.tokenizer.decode(state.prompt.token_ids, self.params.skip_special_tokens)

    def _logprobs(self, state: ChoiceState, delta: Delta, with_prompt: bool) -> CompletionLogprobs | None:
        if self.request.logprobs is None:
            return None
        logprobs = CompletionLogprobs()
        if with_prompt:
            positions = delta.prompt_logprobs or [None] * len(state.prompt.token_ids)
            self._extend(logprobs, state, state.prompt.token_ids, positions)
        self._extend(logprobs, state, delta.token_ids, delta.logprobs or [])
        return logprobs

    def _extend(
        self,
        logprobs: CompletionLogprobs,
        state: ChoiceState,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
    ) -> None:
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = None if position is None else position[token_id]
            # Offsets count the token's text, even if the response shows its id instead.
            text = chosen.decoded_token if chosen is not None else None
            text = self.service.token_text(token_id) if text is None else text
            logprobs.tokens.append(self.token_text(token_id, chosen))
            logprobs.token_logprobs.append(None if chosen is None else finite(chosen.logprob))
            logprobs.text_offset.append(state.text_offset)
            state.text_offset += len(text)
            logprobs.top_logprobs.append(
                None
                if position is None
                else {self.token_text(token, entry): finite(entry.logprob) for token, entry in position.items()}
            )


async def completions(service: Service, request: Request) -> Response:
    """Continue a text."""
    return await generate(service, request, CompletionRequest, CompletionResponseBuilder)


ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        completions,
        "generation",
        request=(CompletionRequest,),
        response=CompletionResponse,
        description="The texts; with stream=true as server-sent events, the last of which is [DONE].",
        streams=True,
        errors=(*TOKENIZATION, *UNAVAILABLE, *GENERATION),
        generates=True,
    ),
)
