"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aiakq.runtime.protocol.request_output import Logprob
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.api.chat_message import MessageDelta, ResponseMessage, deltas_of, message_of
from aiakq.server.api.chat_parsing import MessageParsers
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.execution import answer
from aiakq.server.api.generation import TokenResults
from aiakq.server.api.openai import (
    Choice,
    ChoiceState,
    ChunkChoice,
    FinishReason,
    GenerationChunk,
    GenerationResponse,
    OpenAIResponseBuilder,
    PromptLogprobs,
    Usage,
    finite,
    matched_stop,
    top_by_rank,
)
from aiakq.server.api.routes import PROMPT_ERRORS, Route
from aiakq.server.api.service import Service


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A generated token and exactly ``top_logprobs`` alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of a message."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(Choice):
    """One generated message."""

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None


class ChatChunkChoice(ChunkChoice):
    """Increment of a choice in a streamed chat completion."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None


class ChatCompletionResponse(GenerationResponse[ChatChoice], kw_only=True):
    """The complete response. Fields about the prompt are here, as in vLLM, because all choices share it."""

    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletionChunk(GenerationChunk[ChatChunkChoice], kw_only=True):
    """One event of a stream. The first one has the token ids of the prompt, if requested."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatResponseBuilder(OpenAIResponseBuilder[ChatChoice, ChatChunkChoice]):
    """Builds responses of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    request: ChatCompletionRequest
    has_chunks = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        messages = MessageParsers.of(self.service.renderer, self.request, self.prompts[0], self.id, len(self.states))
        self.messages = messages
        if messages is not None and self.params.skip_special_tokens:
            self.kept_special_tokens = messages.special_tokens

    @property
    def role(self) -> str:
        """Role of the response: that of the last message if it is continued, else ``response_role``."""
        new = self.request.add_generation_prompt is not False
        return self.service.model.response_role if new else self.request.messages[-1].role

    def echoed(self) -> str:
        """Text of the last message, if the request wants it echoed."""
        last = self.request.messages[-1]
        if not self.request.echo or last.role != self.role:
            return ""
        return last.text

    def complete(self, choices: list[ChatChoice], outputs: Sequence[Delta]) -> ChatCompletionResponse:
        return ChatCompletionResponse(
            **self.head(),
            choices=choices,
            usage=self.usage(),
            prompt_token_ids=self.prompts[0].token_ids if self.return_token_ids else None,
            prompt_logprobs=self.prompt_logprobs(outputs[0]),
        )

    def chunk(self, choices: list[ChatChunkChoice], usage: Usage | None | msgspec.UnsetType) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(**self.head(), choices=choices, usage=usage)
        first, self.has_chunks = not self.has_chunks, True
        if first and self.return_token_ids:
            chunk.prompt_token_ids = self.prompts[0].token_ids
        return chunk

    def choice(self, state: ChoiceState, output: Delta) -> ChatChoice:
        if self.messages is None:
            message = ResponseMessage(self.role, self.echoed() + output.text)
        else:
            events = self.messages.feed(state.index, output, ended=True)
            message = message_of(self.role, events, self.echoed())
        return ChatChoice(
            index=state.index,
            message=message,
            logprobs=self._logprobs(output),
            finish_reason=self.end_of(output),
            stop_reason=output.stop_reason,
            matched_stop=matched_stop(output),
            token_ids=output.token_ids if self.return_token_ids else None,
            sentence_length=state.text_length,
            cum_log_probs=finite(output.cumulative_logprob),
        )

    def chunk_choices(self, state: ChoiceState, delta: Delta) -> list[ChatChunkChoice]:
        choices = []
        if not state.started:
            opening = [MessageDelta(role=self.role, content="")]
            if echoed := self.echoed():
                opening.append(MessageDelta(content=echoed))
            for message in opening:
                choices.append(ChatChunkChoice(index=state.index, delta=message, logprobs=None, finish_reason=None))
        ended = delta.finish_reason is not None
        added = [MessageDelta(content=delta.text)]
        if self.messages is not None:
            added = list(deltas_of(self.messages.feed(state.index, delta, ended)))
            if not added and (ended or self.request.logprobs or self.return_token_ids):
                added = [MessageDelta()]
        for message in added[:-1]:
            choices.append(ChatChunkChoice(index=state.index, delta=message, logprobs=None, finish_reason=None))
        state.started = True
        for message in added[-1:]:
            choice = ChatChunkChoice(
                index=state.index,
                delta=message,
                logprobs=self._logprobs(delta),
                finish_reason=self.end_of(delta) if ended else None,
                stop_reason=delta.stop_reason,
                token_ids=delta.token_ids if self.return_token_ids else msgspec.UNSET,
            )
            choices.append(choice)
        return choices

    def end_of(self, delta: Delta) -> FinishReason:
        # As in OpenAI's API, a call of the function that ``tool_choice`` names has the finish reason "stop".
        is_named = isinstance(self.request.tool_choice, Mapping)
        if delta.finish_reason == "stop" and self.messages is not None and not is_named:
            if self.messages.has_valid_calls(delta.index):
                return "tool_calls"
        return super().end_of(delta)

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self.messages is None else self.messages.num_reasoning_tokens

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        content = []
        for token_id, position in zip(delta.token_ids, delta.logprobs or [], strict=True):
            best = top_by_rank(position, self.request.top_logprobs or 0)
            if self.request.logprob_token_ids is not None:
                best = list(position.items())
            top_logprobs = [TopLogprob(*self._token(token, logprob)) for token, logprob in best]
            content.append(TokenLogprob(*self._token(token_id, position[token_id]), top_logprobs))
        return ChatLogprobs(content)

    def _token(self, token_id: int, logprob: Logprob) -> tuple[str, float, list[int]]:
        """Return text, log-probability and bytes of a token. Its bytes may be part of a character."""
        data = list(self.service.renderer.tokenizer.token_bytes(token_id))
        return self.token_text(token_id, logprob), finite(logprob.logprob), data


async def chat_completions(service: Service, request: Request) -> Response:
    """Generate the next message of a conversation, using the model's chat template."""
    return await answer(service, request, TokenResults(ChatCompletionRequest, ChatResponseBuilder))


ROUTES = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        "generation",
        request=(ChatCompletionRequest,),
        response=ChatCompletionResponse,
        description="The messages; with stream=true as server-sent events, the last of which is [DONE].",
        streams=ChatCompletionChunk,
        errors=PROMPT_ERRORS,
        generates=True,
    ),
)
