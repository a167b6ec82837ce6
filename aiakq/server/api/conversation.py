"""Request fields that determine the prompt of a conversation: messages and chat template arguments."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from aiakq.errors import error
from aiakq.server.api.request_model import FailFastList, RequestModel
from aiakq.server.api.unsupported_fields import UNSUPPORTED_MESSAGE_FIELDS

#: Names that a chat template or its renderer defines.
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
_KWARGS_SCHEMA = {
    "type": "object",
    "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}]},
    "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": sorted(RESERVED_TEMPLATE_KWARGS)}},
}


class ChatMessage(RequestModel):
    """One message. ``content`` is text, or parts of type text.

    Clients send back messages that they received elsewhere with fields of their own, which are ignored.
    """

    open = True
    ignored_fields = frozenset()
    unsupported_fields = UNSUPPORTED_MESSAGE_FIELDS

    role: str
    content: Annotated[Any, WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = None

    def to_dict(self, path: str) -> dict[str, Any]:
        """The message as chat templates take it: role and text."""
        self.check_extra_fields(path)
        message = {"role": self.role, "content": join_text_parts(self.content, f"{path}.content")}
        if self.name is not None:
            message["name"] = self.name
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
    chat_template_kwargs: Annotated[dict[str, Any], WithJsonSchema(_KWARGS_SCHEMA)] | None = Field(
        None, description="Arguments of the chat template, such as enable_thinking."
    )

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as dicts. Raises ``unsupported_parameter`` for anything but text."""
        return [message.to_dict(f"messages[{i}]") for i, message in enumerate(self.messages)]

    def template_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for the chat template. Raises ``unsupported_parameter`` or ``invalid_type``."""
        if self.continue_final_message and self.add_generation_prompt:
            raise error(
                "unsupported_parameter", param="continue_final_message", reason="it needs add_generation_prompt=false"
            )
        generation_prompt = self.add_generation_prompt is not False and not self.continue_final_message
        kwargs: dict[str, Any] = {"add_generation_prompt": generation_prompt}
        if self.continue_final_message:
            kwargs["continue_final_message"] = True
        for name, value in (self.chat_template_kwargs or {}).items():
            param = f"chat_template_kwargs.{name:.64}"
            if name in RESERVED_TEMPLATE_KWARGS or not name.isidentifier():
                raise error("unsupported_parameter", param=param, reason="the name is taken")
            # Switches of templates, like enable_thinking, are single values.
            if not isinstance(value, (str, int, float, bool, type(None))):
                raise error("invalid_type", param=param, reason="a text, a number, true, false or null is expected")
            kwargs[name] = value
        return kwargs


def join_text_parts(content: Any, path: str) -> str:
    """The text of a message's content; "" if it is absent."""
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
