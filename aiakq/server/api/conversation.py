"""Request fields that determine the prompt of a conversation: messages and chat template arguments."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, WithJsonSchema

from aiakq.errors import error
from aiakq.runtime.protocol.media import MediaSettings
from aiakq.runtime.text.chat_template import RESERVED_TEMPLATE_KWARGS
from aiakq.runtime.text.message_parts import join_text_parts, read_message
from aiakq.runtime.text.template_facts import TemplateFacts
from aiakq.server.api.foreign_fields import CALL_FIELDS, MESSAGE_FIELDS
from aiakq.server.api.foreign_reasoning import REASONING_FIELDS
from aiakq.server.api.part_fields import check_choice, check_content
from aiakq.server.api.reasoning_fields import ReasoningFields
from aiakq.server.api.reasoning_switch import ReasoningEffort
from aiakq.server.api.request_model import FailFastList, RequestModel
from aiakq.server.api.tools import AsSent, ToolChoice, Tools, allowed_tools, calls_tools, check_tools, forced_tools
from aiakq.server.api.unknown_fields import REFUSE, UnknownFields
from aiakq.server.api.unsupported_fields import UNSUPPORTED_FIELDS, UNSUPPORTED_MESSAGE_FIELDS, UnsupportedField

_TEXT_PART = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"type": {"type": "string"}}}]}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]}
TEMPLATE_KWARGS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": sorted(RESERVED_TEMPLATE_KWARGS)}},
}


class CalledFunction(RequestModel):
    """The function of a past call. ``arguments`` is JSON as text, or the object itself."""

    open = True
    ignored_fields = frozenset()
    unsupported_fields: ClassVar = {}
    foreign_fields = CALL_FIELDS

    name: str
    arguments: str | dict[str, object] | None = None


class PastCall(AsSent):
    """A tool call in a past message."""

    foreign_fields = CALL_FIELDS

    id: str | None = None
    type: str | None = None
    function: CalledFunction

    def to_dict(self) -> dict[str, object]:
        """Return the call as the client sent it, with a type."""
        given = self.as_sent
        return given if given.get("type") is not None else given | {"type": "function"}


class ChatMessage(RequestModel):
    """One message. ``content`` is text, or a list of parts: text under the names of several APIs, and reasoning.

    An assistant's message may have ``tool_calls`` and its reasoning, under either name; a message with role tool has
    the result of the call ``tool_call_id``. Unknown fields are passed to the chat template, which ignores what it does
    not know, because clients send back messages that they received from other servers.
    """

    open = True
    passes_on = True
    ignored_fields = frozenset()
    unsupported_fields = UNSUPPORTED_MESSAGE_FIELDS
    foreign_fields = MESSAGE_FIELDS

    role: str
    content: Annotated[object, WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = None
    tool_calls: FailFastList[PastCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def check_parts(self, path: str, unknown: UnknownFields) -> None:
        check_content(self.content, f"{path}.content", unknown)

    @property
    def text(self) -> str:
        """The text of the content."""
        return join_text_parts(self.content, "messages")

    def to_dicts(self, path: str) -> list[dict[str, object]]:
        """Return the message as chat templates expect it; several if it has results of calls among its parts.

        Raises the errors of ``read_message``. See ``message_forms`` for the form of calls.
        """
        message: dict[str, object] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        for name in ("reasoning_content", "reasoning", "name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                message[name] = value
        return read_message(message, path)


class ConversationFields(ReasoningFields):
    """The fields of requests with a conversation."""

    refuses_effort = True
    foreign_fields = REASONING_FIELDS

    unsupported_fields = {
        **UNSUPPORTED_FIELDS,
        "functions": UnsupportedField("it is the older form of tools, which describes them", ([],)),
        "function_call": UnsupportedField("it is the older form of tool_choice", ("none", "auto")),
    }

    messages: FailFastList[ChatMessage] = Field(min_length=1, description="The conversation: text, and images.")
    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's message after the last one; true if not given."
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message; needs add_generation_prompt=false."
    )
    chat_template_kwargs: Annotated[dict[str, object], WithJsonSchema(TEMPLATE_KWARGS_SCHEMA)] | None = Field(
        None, description="Arguments of the chat template, such as enable_thinking: any JSON values."
    )
    mm_processor_kwargs: Annotated[dict[str, object], WithJsonSchema(TEMPLATE_KWARGS_SCHEMA)] | None = Field(
        None, description="Arguments of the model's image and video processors for this request, such as max_pixels."
    )
    media_io_kwargs: Annotated[dict[str, object], WithJsonSchema(TEMPLATE_KWARGS_SCHEMA)] | None = Field(
        None, description='How files of videos are read in this request: {"video": {"num_frames": 16, "fps": 1}}.'
    )
    documents: FailFastList[dict[str, object]] | None = Field(
        None, description="Documents for chat templates that show them, usually with title and text."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="How much the model reasons; for chat templates that have a switch for it."
    )
    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice = None

    def check_parts(self, path: str, unknown: UnknownFields) -> None:
        check_choice(self.tool_choice, unknown)

    @property
    def may_call(self) -> bool:
        """Whether the model may call tools."""
        return calls_tools(self.tools, self.tool_choice)

    @property
    def forces_calls(self) -> bool:
        """Whether the model must call a tool."""
        return forced_tools(self.tools, self.tool_choice) is not None

    @property
    def media_settings(self) -> MediaSettings:
        """How the media are read."""
        return MediaSettings(self.mm_processor_kwargs or {}, self.media_io_kwargs or {})

    def conversation(self) -> list[dict[str, object]]:
        """Return the messages as dicts. Raises ``unsupported_parameter`` for content other than text."""
        numbered = enumerate(self.messages)
        return [each for number, message in numbered for each in message.to_dicts(f"messages[{number}]")]

    def template_kwargs(self, template: str, unknown: UnknownFields = REFUSE) -> dict[str, object]:
        """Return arguments for the chat template. Raises ``unsupported_parameter`` or ``invalid_type``.

        unknown  says what happens to an effort or a switch that the template does not support.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise error(
                "unsupported_parameter", param="continue_final_message", reason="it needs add_generation_prompt=false"
            )
        generation_prompt = self.add_generation_prompt is not False and not self.continue_final_message
        kwargs: dict[str, object] = {"add_generation_prompt": generation_prompt}
        if self.continue_final_message:
            kwargs["continue_final_message"] = True
        kwargs.update(self.switches(template))
        self.name_without_effect(template, self.chat_template_kwargs or {}, unknown)
        for name, value in (self.chat_template_kwargs or {}).items():
            param = f"chat_template_kwargs.{name:.64}"
            if name in RESERVED_TEMPLATE_KWARGS or not name.isidentifier():
                raise error("unsupported_parameter", param=param, reason="the name is taken")
            if name == "documents":
                _check_documents(value, param)
                if self.documents:
                    raise error("unsupported_parameter", param=param, reason="the field documents is given too")
            kwargs[name] = value
        if self.documents:
            kwargs["documents"] = self.documents
        check_tools(self.tools, self.tool_choice)
        self.tools, self.tool_choice = allowed_tools(self.tools, self.tool_choice)
        if self.may_call:
            kwargs["tools"] = [tool.as_sent for tool in self.tools or ()]
        return kwargs

    def name_hidden(self, facts: TemplateFacts, unknown: UnknownFields) -> None:
        """Ignore the names of participants if the template does not show them."""
        for number, message in enumerate(self.messages):
            if message.name and message.role in ("system", "developer", "user", "assistant") and not facts.shows_names:
                reason = "the chat template does not show it"
                unknown.ignore(error("unsupported_parameter", param=f"messages[{number}].name", reason=reason))
                return

    def asked_reasoning(self) -> dict[str, tuple[object, str]]:
        effort = self.reasoning_effort
        return {} if effort is None else {"reasoning_effort": (effort, "reasoning_effort")}


def _check_documents(documents: object, param: str) -> None:
    """Raise ``invalid_type`` for anything but a list of objects."""
    if documents is not None and not (
        isinstance(documents, list) and all(isinstance(document, dict) for document in documents)
    ):
        raise error("invalid_type", param=param, reason="a list of objects is expected")
