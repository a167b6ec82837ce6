"""Request fields that determine the prompt of a conversation: messages and chat template arguments."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr, WithJsonSchema

from aiakq.errors import error
from aiakq.server.api.foreign_fields import CALL_FIELDS, MESSAGE_FIELDS, ForeignField
from aiakq.server.api.reasoning_switch import ReasoningEffort, reasoning_arguments
from aiakq.server.api.request_model import FailFastList, RequestModel
from aiakq.server.api.tools import ToolChoice, Tools, calls_tools, check_tools, forced_tools
from aiakq.server.api.unknown_fields import REFUSE, UnknownFields
from aiakq.server.api.unsupported_fields import UNSUPPORTED_MESSAGE_FIELDS

#: Template variables that requests must not override.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "template",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "tokenizer_kwargs",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "self",
        "bos_token",
        "eos_token",
    }
)

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]}
TEMPLATE_KWARGS_SCHEMA = {
    "type": "object",
    "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]},
    "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": sorted(RESERVED_TEMPLATE_KWARGS)}},
}


class CalledFunction(RequestModel):
    """The function of a past call. ``arguments`` is JSON as text, or the object itself."""

    open = True
    ignored_fields = frozenset()
    unsupported_fields: ClassVar = {}
    foreign_fields = CALL_FIELDS

    name: str
    arguments: str | dict[str, Any] | None = None


class PastCall(RequestModel):
    """A tool call in a past message."""

    open = True
    ignored_fields = frozenset()
    unsupported_fields: ClassVar = {}
    foreign_fields = CALL_FIELDS

    id: str | None = None
    type: str | None = None
    function: CalledFunction

    def to_dict(self) -> dict[str, Any]:
        """Return the call as chat templates expect it, except for the form of its arguments."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        call: dict[str, Any] = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}


class ChatMessage(RequestModel):
    """One message. ``content`` is text, or parts of type text.

    An assistant's message may have ``tool_calls`` and its reasoning, under either name; a message with role tool has
    the result of the call ``tool_call_id``. Unknown fields are ignored, because clients send back messages that they
    received from other servers.
    """

    open = True
    ignored_fields = frozenset()
    unsupported_fields = UNSUPPORTED_MESSAGE_FIELDS
    foreign_fields = MESSAGE_FIELDS

    role: str
    content: Annotated[Any, WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = None
    tool_calls: FailFastList[PastCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def to_dict(self, path: str) -> dict[str, Any]:
        """Return the message as chat templates expect it; see ``message_forms`` for that of calls."""
        message: dict[str, Any] = {"role": self.role, "content": join_text_parts(self.content, f"{path}.content")}
        if self.tool_calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = message["reasoning"] = reasoning
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message


class ConversationFields(RequestModel):
    """The fields of requests with a conversation."""

    messages: FailFastList[ChatMessage] = Field(min_length=1, description="The conversation; text only.")
    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's message after the last one; true if not given."
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message; needs add_generation_prompt=false."
    )
    chat_template_kwargs: Annotated[dict[str, Any], WithJsonSchema(TEMPLATE_KWARGS_SCHEMA)] | None = Field(
        None, description="Arguments of the chat template, such as enable_thinking."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="How much the model reasons; for chat templates that have a switch for it."
    )
    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice = None

    _thinks: bool | None = PrivateAttr(None)
    _thinks_param: str = PrivateAttr("")

    @property
    def may_call(self) -> bool:
        """Whether the model may call tools."""
        return calls_tools(self.tools, self.tool_choice)

    @property
    def forces_calls(self) -> bool:
        """Whether the model must call a tool."""
        return forced_tools(self.tools, self.tool_choice) is not None

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as dicts. Raises ``unsupported_parameter`` for content other than text."""
        return [message.to_dict(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def template_kwargs(self, template: str, unknown: UnknownFields = REFUSE) -> dict[str, Any]:
        """Return arguments for the chat template. Raises ``unsupported_parameter`` or ``invalid_type``.

        unknown  says what happens to an effort or a switch that the template does not support.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise error(
                "unsupported_parameter", param="continue_final_message", reason="it needs add_generation_prompt=false"
            )
        generation_prompt = self.add_generation_prompt is not False and not self.continue_final_message
        kwargs: dict[str, Any] = {"add_generation_prompt": generation_prompt}
        if self.continue_final_message:
            kwargs["continue_final_message"] = True
        kwargs.update(self._reasoning_arguments(template, unknown))
        for name, value in (self.chat_template_kwargs or {}).items():
            param = f"chat_template_kwargs.{name:.64}"
            if name in RESERVED_TEMPLATE_KWARGS or not name.isidentifier():
                raise error("unsupported_parameter", param=param, reason="the name is taken")
            # Switches of templates, like enable_thinking, are single values.
            if not isinstance(value, (str, int, float, bool, type(None))):
                raise error("invalid_type", param=param, reason="a text, a number, true, false or null is expected")
            kwargs[name] = value
        check_tools(self.tools, self.tool_choice)
        if self.may_call:
            kwargs["tools"] = [tool.to_dict() for tool in self.tools or ()]
        return kwargs

    def take(self, name: str, value: Any, param: str, field: ForeignField, unknown: UnknownFields) -> None:
        if name == "thinks":
            self._thinks, self._thinks_param = value, param
        else:
            super().take(name, value, param, field, unknown)

    def _reasoning_arguments(self, template: str, unknown: UnknownFields) -> dict[str, Any]:
        """Return the template arguments for the reasoning effort, or a switch of another server."""
        effort, thinks = self.reasoning_effort, self._thinks
        if effort is None and thinks is None:
            return {}
        arguments = reasoning_arguments(template, effort, thinks)
        if not arguments and (thinks is not None or effort != "none"):
            reason = "the chat template has no switch for it; a server with --unknown-fields ignore ignores it"
            param = "reasoning_effort" if effort is not None else self._thinks_param
            refusal = error("unsupported_parameter", param=param, reason=reason)
            if unknown.refuses:
                raise refusal
            unknown.ignore(refusal)
        return arguments


def join_text_parts(content: Any, path: str) -> str:
    """Return the text of a message's content; "" if it is absent."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise error("invalid_type", param=path, reason="a string or a list of parts is expected")
    texts: list[str] = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise error("invalid_type", param=f"{path}[{i}]", reason="an object with type and text is expected")
        if part.get("type") != "text":
            raise error("unsupported_parameter", param=f"{path}[{i}].type", reason="only parts of type text are read")
        if not isinstance(part.get("text"), str):
            raise error("invalid_type", param=f"{path}[{i}].text", reason="a string is expected")
        texts.append(part["text"])
    return "\n".join(texts)
