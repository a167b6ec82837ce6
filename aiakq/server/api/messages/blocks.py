"""Convert the messages and content blocks of a request to the messages of a chat request."""

from __future__ import annotations

from aiakq.errors import error
from aiakq.runtime.text.message_parts import read_content, string_of
from aiakq.server.api.part_fields import check_content, check_message, fields, objects_of
from aiakq.server.api.turns import Turns, text_of
from aiakq.server.api.unknown_fields import UnknownFields

#: Prefix of the first block of Claude Code's system prompt, which differs in every request.
_BILLING_MARK = "x-anthropic-billing-header:"
_MESSAGE_FIELDS = fields("role content stop_sequence container stop_details")


def messages_of(system: object, messages: list[object]) -> list[dict[str, object]]:
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


def check_blocks(system: object, messages: list[object], unknown: UnknownFields) -> None:
    """Check the fields of the messages and their blocks. Raises ``unknown_field`` and ``unsupported_parameter``."""
    check_content(system, "system", unknown)
    for message, path in objects_of(messages, "messages"):
        check_message(message, path, _MESSAGE_FIELDS, unknown)
        check_content(message.get("content"), f"{path}.content", unknown)


def _add(turns: Turns, message: dict[str, object], path: str) -> None:
    role, content, path = string_of(message, "role", path), message.get("content"), f"{path}.content"
    if content is None:
        raise error("missing_field", param=path)
    if role == "system":
        turns.system(_system_text(content, path))
    elif role not in ("user", "assistant"):
        param, allowed = path.removesuffix("content") + "role", "user, assistant or system"
        raise error("value_out_of_range", param=param, value=role[:64], allowed=allowed)
    elif role == "user":
        turns.add_user(read_content(content, path, role))
    else:
        turns.add_assistant(read_content(content, path, role))


def _system_text(content: object, path: str) -> str:
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
