"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from aiakq.errors import error
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.request_output import PositionLogprobs
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.api.execution import answer
from aiakq.server.api.generation import TokenResults
from aiakq.server.api.generation_request import GenerationRequest
from aiakq.server.api.openai import (
    Choice,
    ChoiceState,
    ChunkChoice,
    GenerationChunk,
    GenerationResponse,
    OpenAIResponseBuilder,
    PromptLogprobs,
    Usage,
    encoded,
    finite,
    matched_stop,
)
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.routes import PROMPT_ERRORS, Route
from aiakq.server.api.service import Service
from aiakq.server.api.text_offsets import TextOffsets
from aiakq.server.process.request_stream import MAX_PROMPTS, check_sequence_count

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
    suffix: str | None = Field(
        None, description="What comes behind the text, for models whose tokenizer has tokens for filling in the middle."
    )
    echo: bool | None = Field(None, description="Return the prompt before the text, in log-probabilities too.")

    def check_combinations(self) -> None:
        super().check_combinations()
        if self.suffix and self.echo:
            raise error("unsupported_parameter", param="echo", reason="suffix is given: the text is between two parts")

    def sampling_values(self) -> dict[str, object]:
        """Return the sampling values. With ``echo``, ``logprobs`` also applies to the prompt."""
        values = super().sampling_values()
        if self.echo and self.logprobs is not None:
            values.setdefault("prompt_logprobs", self.logprobs)
        return values

    async def tokenize(self, renderer: Renderer, params: SamplingParams) -> list[Prompt]:
        """Tokenize the prompts. Raises empty_prompt, invalid_type, too_many_prompts."""
        prompts = split_prompts(self.prompt)
        check_sequence_count(len(prompts), params)  # before any of them is tokenized
        if self.suffix:
            return await renderer.tokenize_infill(prompts, self.suffix, self.add_special_tokens is not False, params)
        return await renderer.tokenize_prompts(prompts, self.add_special_tokens is not False, params)


def split_prompts(prompt: object, param: str = "prompt") -> list[str | list[int]]:
    """Return the prompts, each as text or token ids, from the four forms of ``param``; ``admit`` validates the ids."""
    if isinstance(prompt, str):
        return [prompt]
    expected = "a string, a list of strings, a list of token ids, or a list of such lists is expected"
    if not isinstance(prompt, list):
        raise error("invalid_type", param=param, reason=expected)
    if not prompt:
        raise error("empty_prompt", param=param)
    if type(prompt[0]) in (int, float):
        return [_integers(prompt)]
    if all(isinstance(entry, str) for entry in prompt):
        return prompt
    if not all(isinstance(entry, list) for entry in prompt):
        raise error("invalid_type", param=param, reason=expected)
    return [_integers(entry) for entry in prompt]


def _integers(token_ids: list[object]) -> list[Any]:
    """Return ``token_ids`` with integers for numbers like 4.0; see ``request_model.Integer``."""
    if float not in set(map(type, token_ids)):
        return token_ids
    return [int(entry) if isinstance(entry, float) and entry.is_integer() else entry for entry in token_ids]


class CompletionLogprobs(msgspec.Struct):
    """OpenAI's four parallel lists, one entry per token.

    An entry of ``top_logprobs`` has the sampled token and the most likely ones. Two tokens with the same text (parts
    of a character) share a key; ``return_tokens_as_token_ids`` keeps them apart.
    """

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class CompletionChoice(Choice):
    """One generated text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChunkChoice(ChunkChoice):
    """Increment of a choice in a streamed completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(GenerationResponse[CompletionChoice], kw_only=True):
    """The complete response."""

    object: Literal["text_completion"] = "text_completion"


class CompletionChunk(GenerationChunk[CompletionChunkChoice], kw_only=True):
    """One event of a stream."""

    object: Literal["text_completion"] = "text_completion"


class CompletionResponseBuilder(OpenAIResponseBuilder[CompletionChoice, CompletionChunkChoice]):
    """Builds responses of /v1/completions. With ``echo``, every choice starts with its prompt."""

    id_prefix = "cmpl-"
    request: CompletionRequest

    @cached_property
    def _prompt_texts(self) -> dict[int, str]:
        return {}

    def complete(self, choices: list[CompletionChoice], outputs: Sequence[Delta]) -> CompletionResponse:
        return CompletionResponse(**self.head(), choices=choices, usage=self.usage())

    def chunk(self, choices: list[CompletionChunkChoice], usage: Usage | None | msgspec.UnsetType) -> CompletionChunk:
        return CompletionChunk(**self.head(), choices=choices, usage=usage)

    def choice(self, state: ChoiceState, output: Delta) -> CompletionChoice:
        return CompletionChoice(
            index=state.index,
            text=self._echo(state) + output.text,
            logprobs=self._logprobs(state, output),
            finish_reason=self.end_of(output),
            stop_reason=output.stop_reason,
            matched_stop=matched_stop(output),
            token_ids=output.token_ids if self.return_token_ids else None,
            prompt_token_ids=state.prompt.token_ids if self.return_token_ids else None,
            prompt_logprobs=self.prompt_logprobs(output),
            sentence_length=state.text_length,
            cum_log_probs=finite(output.cumulative_logprob),
        )

    def chunk_choices(self, state: ChoiceState, delta: Delta) -> list[CompletionChunkChoice]:
        choice = CompletionChunkChoice(
            index=state.index,
            text=self._echo(state) + delta.text,
            logprobs=self._logprobs(state, delta),
            finish_reason=None if delta.finish_reason is None else self.end_of(delta),
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self.return_token_ids else msgspec.UNSET,
        )
        if self.return_token_ids and not state.started:
            choice.prompt_token_ids = state.prompt.token_ids
        state.started = True
        return [choice]

    def _echo(self, state: ChoiceState) -> str:
        """Return the prompt before the first text, if the request wants it echoed."""
        return self._prompt_text(state) if self.request.echo and not state.started else ""

    def _prompt_text(self, state: ChoiceState) -> str:
        """Return the prompt as sent, or the decoded token ids including special tokens."""
        if state.prompt.text is not None:
            return state.prompt.text
        text = self._prompt_texts.get(id(state.prompt))
        if text is None:  # computed once for all choices
            text = self.service.renderer.tokenizer.decode(state.prompt.token_ids, skip_special_tokens=False)
            self._prompt_texts[id(state.prompt)] = text
        return text

    def _logprobs(self, state: ChoiceState, delta: Delta) -> CompletionLogprobs | None:
        if self.request.logprobs is None:
            return None
        logprobs = CompletionLogprobs()
        if self.request.echo and not state.started:
            positions = delta.prompt_logprobs or [None] * len(state.prompt.token_ids)
            text = self._prompt_text(state)
            self._extend(logprobs, state.prompt.token_ids, positions)
            logprobs.text_offset += prompt_offsets(self.service.renderer.tokenizer, state.prompt.token_ids, text)
            state.offsets = TextOffsets(len(text))
        self._extend(logprobs, delta.token_ids, delta.logprobs or [])
        logprobs.text_offset += [state.offsets.add(self.bytes_in_text(token_id)) for token_id in delta.token_ids]
        return logprobs

    def _extend(
        self,
        logprobs: CompletionLogprobs,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
    ) -> None:
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = None if position is None else position[token_id]
            logprobs.tokens.append(self.token_text(token_id, chosen))
            logprobs.token_logprobs.append(None if chosen is None else finite(chosen.logprob))
            logprobs.top_logprobs.append(
                None
                if position is None
                else encoded(
                    {self.token_text(token, entry): finite(entry.logprob) for token, entry in position.items()}
                )
            )


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Return the offset in ``text`` of each token of a prompt, in characters.

    Tokens that are not in the text have zero length: special tokens that the tokenizer adds, and the space that some
    tokenizers put before the first word.
    """
    added = [tokenizer.token_bytes(token_id) for token_id in token_ids]
    if b"".join(added).decode(errors="replace") != text:
        special = tokenizer.special_ids.intersection(token_ids)
        absent = {token_id for token_id in special if tokenizer.token_text(token_id) not in text}
        added = [b"" if token_id in absent else data for token_id, data in zip(token_ids, added, strict=True)]
        first = next((at for at, data in enumerate(added) if data), None)
        if first is not None and not text.startswith(" "):
            added[first] = added[first].removeprefix(b" ")
    offsets = TextOffsets()
    return [min(offsets.add(data), len(text)) for data in added]


async def completions(service: Service, request: Request) -> Response:
    """Generate a continuation of each prompt."""
    return await answer(service, request, TokenResults(CompletionRequest, CompletionResponseBuilder))


ROUTES = (
    Route(
        "POST",
        "/v1/completions",
        completions,
        "generation",
        request=(CompletionRequest,),
        response=CompletionResponse,
        description="The texts; with stream=true as server-sent events, the last of which is [DONE].",
        streams=CompletionChunk,
        errors=PROMPT_ERRORS,
        generates=True,
    ),
)
