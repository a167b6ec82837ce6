"""Convert the messages and content blocks of a request to the messages of a chat request."""

from __future__ import annotations

from typing import Any

from aiakq.errors import error
from aiakq.runtime.text.message_parts import Content, read_content, string_of
from aiakq.server.api.foreign_fields import MESSAGE_FIELDS
from aiakq.server.api.part_fields import check_content, check_fields, fields, objects_of
from aiakq.server.api.turns import Turns, text_of
from aiakq.server.api.unknown_fields import UnknownFields

#: Prefix of the first block of Claude Code's system prompt, which differs in every request.
_BILLING_MARK = "x-anthropic-billing-header:"
_MESSAGE_FIELDS = fields("role content stop_sequence container stop_details") | MESSAGE_FIELDS.keys()


def messages_of(system: Any, messages: list[Any]) -> list[dict[str, Any]]:
    """Return the chat messages for ``system`` and ``messages``.

    Raises ``unsupported_parameter``, ``invalid_type``, ``missing_field`` and ``value_out_of_range``.
    """
    turns = Turns()
    if system is not None:
        turns.system(_system_text(system, "system"))
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        if not isinstance(message, dict):
            raise error("invalid_type", param=path, reason="an object with role and content is expected")
        _add(turns, message, path)
    return turns.messages


def check_blocks(system: Any, messages: list[Any], unknown: UnknownFields) -> None:
    """Call ``check_fields`` for the messages and their blocks. Raises ``unknown_field``."""
    check_content(system, "system", unknown)
    for message, path in objects_of(messages, "messages"):
        check_fields(message, path, _MESSAGE_FIELDS, unknown)
        check_content(message.get("content"), f"{path}.content", unknown)


def _add(turns: Turns, message: dict[str, Any], path: str) -> None:
    role, content, path = string_of(message, "role", path), message.get("content"), f"{path}.content"
    if content is None:
        raise error("missing_field", param=path)
    if role == "system":
        turns.system(_system_text(content, path))
    elif role not in ("user", "assistant"):
        param, allowed = path.removesuffix("content") + "role", "user, assistant or system"
        raise error("value_out_of_range", param=param, value=role[:64], allowed=allowed)
    elif role == "user":
        _add_user(turns, read_content(content, path))
    else:
        _add_assistant(turns, read_content(content, path))


def _system_text(content: Any, path: str) -> str:
    """Return the text of a system prompt, without a block that differs per request and would defeat prefix caching."""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = [
            part
            for part, text in zip(content, texts, strict=True)
            if not (isinstance(text, str) and text.startswith(_BILLING_MARK))
        ]
    elif isinstance(content, str) and content.startswith(_BILLING_MARK):
        content = content.partition("\n")[2]
    return text_of(content, path)


def _add_user(turns: Turns, content: Content) -> None:
    """Add a user turn: each tool result as a separate message, text between them as user messages."""
    begin = 0
    for call_id, result, position in content.results:
        if position > begin:
            turns.user("\n".join(content.texts[begin:position]))
            begin = position
        turns.result(call_id, result)
    if content.texts[begin:] or not content.results:
        turns.user("\n".join(content.texts[begin:]))


def _add_assistant(turns: Turns, content: Content) -> None:
    """Add an assistant turn, without redacted thinking, which cannot be read."""
    turns.reasoning("\n".join(content.thoughts))
    if content.texts or not content.calls:
        turns.answer("\n".join(content.texts))
    for call in content.calls:
        turns.call(*call)
