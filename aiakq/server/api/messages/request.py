"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and their conversion to chat requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PrivateAttr, WithJsonSchema, model_validator

from aiakq.errors import error
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import PARAMETERS, SamplingParams
from aiakq.server.api.foreign_field import Fields, ForeignField, Sent
from aiakq.server.api.generation_request import ModelName
from aiakq.server.api.messages.blocks import check_blocks, messages_of
from aiakq.server.api.reasoning_switch import ReasoningEffort
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.request_model import FailFastList, Integer, RequestModel
from aiakq.server.api.schema_names import check_schema_names, renamed_schema
from aiakq.server.api.tools import MAX_TOOLS
from aiakq.server.api.translated import TokenLimit, Translated, TranslatedRequest
from aiakq.server.api.unknown_fields import UnknownFields
from aiakq.server.api.unsupported_fields import UnsupportedField

_BLOCKS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
#: Chat parameter -> this API's name, where they differ, except parameters of tools.
_NAMES = {
    "stop": "stop_sequences",
    "tool_choice.function.name": "tool_choice.name",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
_TOOL_PARTS = {".function.parameters": ".input_schema", ".function.strict": ".strict"}
_TOOL = re.compile(r"(tools\[\d+\])(.*)")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesTool(RequestModel):
    """A tool of the client. ``input_schema`` is the JSON schema of its arguments."""

    open = True
    ignored_fields = frozenset()
    unsupported_fields: ClassVar = {}

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _in_own_names(cls, value: object) -> object:
        return renamed_schema(value, "input_schema") if isinstance(value, dict) else value


class MessagesToolChoice(RequestModel):
    """Which tools to call: auto, any (at least one), tool (the one named ``name``) or none."""

    ignored_fields = frozenset()
    unsupported_fields: ClassVar = {}

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """Whether the model reasons, if its chat template has a switch, and how long."""

    ignored_fields = frozenset({"display"})
    unsupported_fields: ClassVar = {}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Integer, PARAMETERS["thinking_token_budget"]] | None = None


class OutputFormat(RequestModel):
    """The JSON schema of the response, which is enforced."""

    ignored_fields = frozenset()
    unsupported_fields: ClassVar = {}

    type: Literal["json_schema"]
    schema_: dict[str, object] | None = Field(None, alias="schema")


class OutputConfig(RequestModel):
    """The reasoning effort, if the chat template supports one, and the response format."""

    ignored_fields = frozenset({"task_budget"})
    unsupported_fields: ClassVar = {}

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


def _output_config(value: object, sent: Sent) -> Fields:
    """The format of the text had a field of its own before."""
    return {} if value == {} else {"output_config": {"format": value}}


class MessagesFields(Translated):
    """Fields of both routes."""

    foreign_fields = {**Translated.foreign_fields, "output_format": ForeignField(_output_config)}
    ignored_fields = frozenset(
        {
            *("metadata", "service_tier", "cache_control", "inference_geo", "speed", "betas", "diagnostics"),
            *("context_management", "user_profile_id", "workspace_id"),
        }
    )
    unsupported_fields = {
        **Translated.unsupported_fields,
        "parallel_tool_calls": UnsupportedField("use tool_choice.disable_parallel_tool_use", (True,)),
        "container": UnsupportedField("no code is run"),
        "mcp_servers": UnsupportedField("the server calls no tools itself", ([],)),
    }

    model: ModelName | None = Field(None, description="A served name; the first one if not given.")
    messages: Annotated[list[object], Field(min_length=1, json_schema_extra={"items": {"type": "object"}})] = Field(
        description="The conversation: text, tool_use, tool_result and thinking."
    )
    system: Annotated[object, WithJsonSchema(_BLOCKS_SCHEMA)] = Field(None, description="Comes first.")
    tools: Annotated[FailFastList[MessagesTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: MessagesToolChoice | None = Field(None, description="auto, any, tool (that of name) or none.")
    thinking: Thinking | None = Field(
        None,
        description="enabled, adaptive or disabled, for chat templates that have a switch for it. Unless disabled, "
        "budget_tokens is thinking_token_budget, if --reasoning-parser says what ends a thought.",
    )
    output_config: OutputConfig | None = Field(
        None, description="effort, for chat templates that have a switch for it, and format, a JSON schema."
    )

    def check_parts(self, path: str, unknown: UnknownFields) -> None:
        check_blocks(self.system, self.messages, unknown)

    def conversation_fields(self) -> dict[str, object]:
        """Return the fields of the chat request."""
        messages = messages_of(self.system, self.messages)
        if not messages:
            raise error("value_out_of_range", param="messages", value="empty", allowed="at least one message")
        continued = messages[-1]["role"] == "assistant"
        if continued and "tool_calls" in messages[-1]:
            reason = "the last message has calls of tools, whose results are expected"
            raise error("unsupported_parameter", param=f"messages[{len(self.messages) - 1}]", reason=reason)
        choice = self.tool_choice
        return {
            "messages": messages,
            "continue_final_message": True if continued else None,
            "add_generation_prompt": False if continued else None,
            "tools": [_chat_tool(tool, f"tools[{number}]") for number, tool in enumerate(self.tools or ())] or None,
            "tool_choice": None if choice is None else _chat_choice(choice),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        }

    def own_name(self, param: str) -> str:
        tool = _TOOL.fullmatch(param)
        if tool is not None:
            return tool[1] + _TOOL_PARTS.get(tool[2], tool[2].removeprefix(".function"))
        return _NAMES.get(param, param)

    def asked_reasoning(self) -> dict[str, tuple[object, str]]:
        asked: dict[str, tuple[object, str]] = {}
        if self.output_config is not None and self.output_config.effort is not None:
            asked["reasoning_effort"] = self.output_config.effort, "output_config.effort"
        if self.thinking is not None:
            asked["thinks"] = self.thinking.type != "disabled", "thinking"
        return asked


class MessagesRequest(MessagesFields, TranslatedRequest):
    """The body of POST /v1/messages."""

    own_names = {"stop": "stop_sequences"}
    ignored_fields = MessagesFields.ignored_fields
    unsupported_fields = MessagesFields.unsupported_fields

    max_tokens: TokenLimit = Field(description="Tokens to generate at most; fewer at the end of the context.")
    stop_sequences: FailFastList[str] | None = Field(None, description="The text ends before one of these.")

    _has_budget: bool = PrivateAttr(False)

    def chat_fields(self) -> dict[str, object]:
        format = None if self.output_config is None else self.output_config.format
        response_format = None
        if format is not None:
            response_format = {"type": "json_schema", "json_schema": {"schema": format.schema_}}
        return {
            **self.conversation_fields(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "response_format": response_format,
            **({} if self._budget is None else {"thinking_token_budget": self._budget}),
        }

    def own_name(self, param: str) -> str:
        if param == "thinking_token_budget" and self._budget is not None:
            return "thinking.budget_tokens"
        return super().own_name(param)

    @property
    def _budget(self) -> int | None:
        """The budget of ``thinking``."""
        thinking = self.thinking
        return thinking.budget_tokens if thinking is not None and thinking.type != "disabled" else None

    def has_budget_in(self, param: str) -> bool:
        return param == "thinking" and self._has_budget

    def switch_reasoning(self, renderer: Renderer) -> None:
        self._has_budget = self._budget is not None and renderer.message_format.thought_marks is not None
        super().switch_reasoning(renderer)

    async def with_budgets(self, renderer: Renderer, prompts: Sequence[Prompt], params: SamplingParams) -> list[Prompt]:
        if self._budget is not None and renderer.message_format.thought_marks is None:
            # Clients have to send it, so that it is not refused as in chat.
            renderer.unknown_fields.ignore(error("unknown_field", param="thinking.budget_tokens", hint=""))
            return list(prompts)
        return await super().with_budgets(renderer, prompts, params)


class CountTokensRequest(MessagesFields):
    """The body of POST /v1/messages/count_tokens."""

    def chat_fields(self) -> dict[str, object]:
        return self.conversation_fields()


def _chat_tool(tool: MessagesTool, path: str) -> dict[str, object]:
    """Convert a tool to the chat format. Raises ``unsupported_parameter`` and ``missing_field``."""
    if tool.type not in (None, "custom"):
        reason = f"{tool.type:.64}: only tools of the client are called, which have an input_schema"
        raise error("unsupported_parameter", param=f"{path}.type", reason=reason)
    if tool.input_schema is None:
        raise error("missing_field", param=f"{path}.input_schema")
    check_schema_names(tool.model_extra or {}, path, tool.input_schema)
    given = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}}


def _chat_choice(choice: MessagesToolChoice) -> object:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise error("missing_field", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
