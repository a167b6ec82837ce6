"""Requests of other APIs that are executed as the equivalent chat completion request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, PrivateAttr, WithJsonSchema

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import PARAMETERS, SamplingParams
from aiakq.server.api.chat_request import ChatCompletionRequest
from aiakq.server.api.conversation import TEMPLATE_KWARGS_SCHEMA
from aiakq.server.api.foreign_fields import GENERATION_FIELDS
from aiakq.server.api.generation_request import RequestFields
from aiakq.server.api.reasoning_fields import ReasoningFields
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.request_model import Integer, RequestModel, parse_values
from aiakq.server.api.sampling_fields import sampling_model
from aiakq.server.api.unsupported_fields import UNSUPPORTED_FIELDS, UnsupportedField

#: Sampling fields of chat that these APIs accept in addition to their own.
_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
    *("min_tokens", "stop_token_ids", "include_stop_str_in_output", "allowed_token_ids", "bad_words"),
    *("repetition_detection", "thinking_token_budget", "extra_args"),
)
_CHAT_ONLY = "only chat completions have it"
#: Fields of other routes that would change the answer.
_UNSUPPORTED = {
    **{
        name: field
        for name, field in UNSUPPORTED_FIELDS.items()
        if name not in GENERATION_FIELDS and name not in ("tools", "tool_choice") and not field.hint
    },
    "functions": UnsupportedField("it is the older form of tools, which describes them", ([],)),
    "function_call": UnsupportedField("it is the older form of tool_choice", ("none", "auto")),
    "documents": UnsupportedField("they belong into chat_template_kwargs", ([],)),
    "include_reasoning": UnsupportedField("reasoning is always returned", (True,)),
    "add_special_tokens": UnsupportedField(_CHAT_ONLY, (False,)),
    "return_tokens_as_token_ids": UnsupportedField(_CHAT_ONLY, (False,)),
    "guided_whitespace_pattern": UnsupportedField(_CHAT_ONLY, ("",)),
}
#: Maximum number of generated tokens, which may exceed the context.
TokenLimit = Annotated[Integer, replace(PARAMETERS["max_tokens"], limited_by="")]

if TYPE_CHECKING:

    class _Fields(RequestModel):
        """The sampling fields of these APIs."""
else:
    _Fields = sampling_model("TranslatedFields", _SAMPLING_FIELDS)


class Translated(ReasoningFields):
    """A request of another API about a conversation.

    same_fields  fields with the same name and meaning in chat.
    chat         the chat request, once ``check_combinations`` has been called.
    """

    same_fields: ClassVar[tuple[str, ...]] = ()

    foreign_fields = GENERATION_FIELDS
    unsupported_fields = _UNSUPPORTED

    _chat: ChatCompletionRequest | None = PrivateAttr(None)

    @property
    def chat(self) -> ChatCompletionRequest:
        assert self._chat is not None
        return self._chat

    # --- supplied by subclasses

    def chat_fields(self) -> dict[str, object]:
        """Return the fields of the chat request, except ``same_fields``.

        Raises ``unsupported_parameter`` and other errors with this API's names.
        """
        raise NotImplementedError

    def own_name(self, param: str) -> str:
        """Return this API's name for a parameter of the chat request."""
        return param

    # --- execution

    def check_combinations(self) -> None:
        """Create ``chat``. Raises the errors of ``ChatCompletionRequest`` and its ``check_combinations``."""
        same = {name: getattr(self, name) for name in self.same_fields}
        fields = self.chat_fields()
        for name in same.keys() & fields.keys():
            if None not in (same[name], fields[name]) and same[name] != fields[name]:
                reason = f"{name} is given too, with another value"
                raise error("unsupported_parameter", param=self.own_name(name), reason=reason)
        fields = same | fields
        try:
            self._chat = parse_values(ChatCompletionRequest, fields)
            self._chat.check_combinations()
        except AiakqError as failure:
            raise self.rename_param(failure) from None

    def switch_reasoning(self, renderer: Renderer) -> None:
        """Add ``switches`` to the template arguments of ``chat``, which take precedence."""
        given = self.chat.chat_template_kwargs or {}
        self.name_without_effect(renderer.chat_template, given, renderer.unknown_fields)
        self.chat.chat_template_kwargs = self.switches(renderer.chat_template) | given

    def rename_param(self, failure: AiakqError) -> AiakqError:
        """Return ``failure`` with this API's name of the parameter."""
        failure = failure if self._chat is None else self._chat.rename_param(failure)
        name = failure.param and self.own_name(failure.param)
        return failure if name == failure.param else error(failure.id, **failure.fields | {"param": name})


class TranslatedRequest(_Fields, RequestFields, Translated):
    """A request of another API that generates one message."""

    same_fields = (
        *_SAMPLING_FIELDS,
        *("model", "stream", "priority", "cache_salt", "request_id", "chat_template_kwargs"),
    )

    chat_template_kwargs: Annotated[dict[str, object], WithJsonSchema(TEMPLATE_KWARGS_SCHEMA)] | None = Field(
        None, description="Arguments of the chat template, such as enable_thinking."
    )

    def sampling_params(self, defaults: Mapping[str, object]) -> SamplingParams:
        """Return the sampling parameters: the request's values, else ``defaults``."""
        return self.chat.sampling_params(defaults)

    async def tokenize(self, renderer: Renderer, params: SamplingParams) -> list[Prompt]:
        """Tokenize the prompt. Clamps the token limit to the context, because agents always send the same limit."""
        self.switch_reasoning(renderer)
        prompts = await self.chat.tokenize(renderer, params)
        limits = renderer.limits
        room = limits.longest - len(prompts[0].token_ids)
        if params.max_tokens is not None and room > 0:
            params.max_tokens = min(params.max_tokens, room)
        return prompts

    async def grammar_of(self, renderer: Renderer, prompts: list[Prompt], grammar: Grammar | None) -> Grammar | None:
        """Return the grammar for the response, after checking it."""
        return await self.chat.grammar_of(renderer, prompts, grammar)

    async def with_budgets(self, renderer: Renderer, prompts: Sequence[Prompt], params: SamplingParams) -> list[Prompt]:
        """Return the prompt with the budget of thoughts, which ``params`` has. Raises ``unsupported_parameter``."""
        return await self.chat.with_budgets(renderer, prompts, params)
