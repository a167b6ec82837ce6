"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from aiakq.errors import AiakqError, error
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.structured.grammars import Grammar
from aiakq.runtime.text.output_processor import Delta
from aiakq.runtime.text.outputs import Logprob
from aiakq.server.api.answer_grammar import Reasoning, answer_grammar
from aiakq.server.api.chat_message import MessageDelta, ResponseMessage, deltas_of, message_of
from aiakq.server.api.chat_parsing import MessageParsers, reasoning_state
from aiakq.server.api.conversation import ConversationFields
from aiakq.server.api.generation import generate
from aiakq.server.api.openai import (
    Choice,
    ChoiceState,
    ChunkChoice,
    GenerationChunk,
    GenerationRequest,
    GenerationResponse,
    OpenAIResponseBuilder,
    PromptLogprobs,
    finite,
    top_by_rank,
)
from aiakq.server.api.request_model import LIMITED_BY, Integer
from aiakq.server.api.routes import PROMPT_ERRORS, Route
from aiakq.server.api.service import Service
from aiakq.server.api.thought_budgets import message_budget
from aiakq.server.process.request_stream import Prompt


class ChatCompletionRequest(GenerationRequest, ConversationFields):
    """The body of POST /v1/chat/completions. ``logprobs`` and ``top_logprobs`` are OpenAI's form of ``logprobs``."""

    logprobs: bool | None = Field(None, description="Return the log-probability of every token.")
    top_logprobs: Annotated[Integer, Field(json_schema_extra={LIMITED_BY: "logprobs"})] | None = Field(
        None, description="Return this many of the most likely tokens per position; needs logprobs=true."
    )
    max_tokens: Annotated[Integer, Field(json_schema_extra={LIMITED_BY: "max_tokens"})] | None = Field(
        None, description="Tokens to generate at most; up to the end of the context if not given."
    )
    max_completion_tokens: Annotated[Integer, Field(json_schema_extra={LIMITED_BY: "max_tokens"})] | None = Field(
        None, description="The newer name of max_tokens, which it overrides."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: calls after the first one are left out; true if not given."
    )
    include_reasoning: bool | None = Field(None, description="false: reasoning is left out; needs --reasoning-parser.")
    echo: bool | None = Field(
        None, description="Return the last message before the text, if the text continues it or is of its role."
    )

    def check_combinations(self) -> None:
        super().check_combinations()
        if self.top_logprobs is not None and self.top_logprobs != 0 and not self.logprobs:
            raise error("unsupported_parameter", param="top_logprobs", reason="it needs logprobs=true")

    def sampling_values(self) -> dict[str, Any]:
        """Return the sampling values. Without a limit, the output may fill the context, as chat clients expect."""
        values = super().sampling_values()
        values["max_tokens"] = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        values["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return values

    def rename_param(self, failure: AiakqError) -> AiakqError:
        failure = super().rename_param(failure)
        names = {"logprobs": "top_logprobs", "prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if failure.param not in names:
            return failure
        return error(failure.id, **failure.fields | {"param": names[failure.param]})

    async def tokenize(self, service: Service, params: SamplingParams) -> list[Prompt]:
        kwargs = self.template_kwargs(service.chat_template, service.unknown_fields)
        if "tools" in kwargs:
            service.check_calls_tools(is_forced=self.forces_calls)
        if self.include_reasoning is False and service.message_format.reasoning_parser is None:
            reason = "the server was started without --reasoning-parser"
            raise error("unsupported_parameter", param="include_reasoning", reason=reason)
        # The template writes special tokens itself.
        add_special_tokens = bool(self.add_special_tokens)
        return [await service.tokenize_chat(self.conversation(), kwargs, add_special_tokens, params)]

    async def grammar_of(self, service: Service, prompts: Sequence[Prompt], grammar: Grammar | None) -> Grammar | None:
        parser = service.message_format.reasoning_parser
        if grammar is None and not self.may_call:
            return None
        reasoning = None if parser is None else Reasoning(parser, *reasoning_state(service, self, prompts[0]))
        return await answer_grammar(service, self, grammar, reasoning)

    async def with_budgets(self, service: Service, prompts: Sequence[Prompt], params: SamplingParams) -> list[Prompt]:
        if service.message_format.reasoning_parser is None:
            return await super().with_budgets(service, prompts, params)
        [prompt] = prompts
        state = reasoning_state(service, self, prompt)
        return [replace(prompt, thought=await message_budget(service, params, *state))]


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


class ChatResponseBuilder(OpenAIResponseBuilder):
    """Builds responses of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    request: ChatCompletionRequest
    response_type = ChatCompletionResponse
    chunk_type = ChatCompletionChunk
    has_chunks = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        messages = MessageParsers.of(self.service, self.request, self.prompts[0], self.id, len(self.states))
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

    def response_fields(self, outputs: Sequence[Delta]) -> dict[str, Any]:
        return {**self.prompt_token_ids(self.prompts[0]), "prompt_logprobs": self.prompt_logprobs(outputs[0])}

    def chunk_fields(self) -> dict[str, Any]:
        first, self.has_chunks = not self.has_chunks, True
        return self.prompt_token_ids(self.prompts[0]) if first else {}

    def choice(self, state: ChoiceState, output: Delta, totals: Mapping[str, Any]) -> ChatChoice:
        if self.messages is None:
            message = ResponseMessage(self.role, self.echoed() + output.text)
        else:
            events = self.messages.feed(state.index, output, ended=True)
            message = message_of(self.role, events, self.echoed())
        return ChatChoice(message=message, **self._fields(state, output), **totals)

    def chunk_choices(self, state: ChoiceState, delta: Delta, totals: Mapping[str, Any]) -> list[ChatChunkChoice]:
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
        fields = self._fields(state, delta)
        return [*choices, *(ChatChunkChoice(delta=message, **fields, **totals) for message in added[-1:])]

    def finish(self, delta: Delta) -> dict[str, Any]:
        fields = super().finish(delta)
        # As in OpenAI's API, a call of the function that ``tool_choice`` names has the finish reason "stop".
        is_named = isinstance(self.request.tool_choice, Mapping)
        if delta.finish_reason == "stop" and self.messages is not None and not is_named:
            if self.messages.has_valid_calls(delta.index):
                fields["finish_reason"] = "tool_calls"
        return fields

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self.messages is None else self.messages.num_reasoning_tokens

    def _fields(self, state: ChoiceState, delta: Delta) -> dict[str, Any]:
        """Return the fields that a choice shares with its streamed chunks."""
        state.started = True
        return {
            "index": state.index,
            "logprobs": self._logprobs(delta),
            **self.finish(delta),
            **self.token_ids(delta),
        }

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
        data = list(self.service.tokenizer.token_bytes(token_id))
        return self.token_text(token_id, logprob), finite(logprob.logprob), data


async def chat_completions(service: Service, request: Request) -> Response:
    """Generate the next message of a conversation, using the model's chat template. Only text content is supported."""
    return await generate(service, request, ChatCompletionRequest, ChatResponseBuilder)


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
