"""Convert the input items of a request to the messages of a chat request."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from aiakq.errors import error
from aiakq.runtime.text.message_parts import check_keys, read_content, string_of, type_of
from aiakq.server.api.part_fields import check_content, check_fields, check_message, fields, objects_of
from aiakq.server.api.responses.tools import flat_name
from aiakq.server.api.turns import Turns, text_of
from aiakq.server.api.unknown_fields import UnknownFields

#: Prefix of reasoning that this server has encoded as ``encrypted_content``.
_REASONING_MARK = "aiakq1."
#: Type of an item -> its fields. Those of other types are refused.
_ITEM_FIELDS = {
    "message": fields("role content phase"),
    "reasoning": fields("summary content encrypted_content"),
    "function_call": fields("call_id name arguments namespace caller parsed_arguments created_by"),
    "function_call_output": fields("call_id output name caller created_by"),
}


def messages_of(instructions: str | None, items: object) -> list[dict[str, object]]:
    """Return the chat messages for ``instructions`` and ``input``.

    Raises ``unsupported_parameter``, ``invalid_type``, ``missing_field`` and ``value_out_of_range``.
    """
    turns = Turns()
    turns.system(instructions or "")
    if isinstance(items, str):
        turns.user(items)
        return turns.messages
    if not isinstance(items, list):
        raise error("invalid_type", param="input", reason="a string or a list of items is expected")
    for number, item in enumerate(items):
        _add(turns, item, f"input[{number}]")
    return turns.messages


def check_items(items: object, unknown: UnknownFields) -> None:
    """Call ``check_fields`` for the items of ``input`` and their contents. Raises ``unknown_field``."""
    if not isinstance(items, list):
        return
    for item, path in objects_of(items, "input"):
        kind = item.get("type") or "message"
        known = _ITEM_FIELDS.get(kind) if isinstance(kind, str) else None
        if known is None:
            continue
        if kind == "message":
            check_message(item, path, known, unknown)
        else:
            check_fields(item, path, known, unknown)
        for name in ("content", "summary", "output"):
            check_content(item.get(name), f"{path}.{name}", unknown)


def continues(items: object) -> bool:
    """Whether the response continues the last item, an assistant message that is marked as incomplete."""
    last = items[-1] if isinstance(items, list) and items else None
    if not isinstance(last, dict) or last.get("type", "message") != "message":
        return False
    return last.get("role") == "assistant" and last.get("status") in ("in_progress", "incomplete")


def encoded_reasoning(text: str) -> str:
    """Encode reasoning as ``encrypted_content``. It is not encrypted, but clients send it back unchanged."""
    return _REASONING_MARK + base64.b64encode(text.encode(errors="replace")).decode()


def _add(turns: Turns, item: Any, path: str) -> None:
    kind = type_of(item, path, default="message")
    if kind == "message":
        _add_message(turns, item, path)
    elif kind == "reasoning":
        turns.reasoning(_reasoning_of(item, path))
    elif kind == "function_call":
        namespace = item.get("namespace")
        name = string_of(item, "name", path)
        if namespace is not None:
            name = flat_name(string_of(item, "namespace", path), name)
        arguments = string_of(item, "arguments", path)
        check_keys(arguments, f"{path}.arguments")
        turns.call(string_of(item, "call_id", path), name, arguments)
    elif kind == "function_call_output":
        if item.get("output") is None:
            raise error("missing_field", param=f"{path}.output")
        turns.result(string_of(item, "call_id", path), text_of(item["output"], f"{path}.output"))
    elif kind == "item_reference":
        reason = "responses are not stored; the item itself is expected"
        raise error("unsupported_parameter", param=f"{path}.type", reason=f"item_reference: {reason}")
    else:
        reason = f"items of type {kind:.64} are not read"
        raise error("unsupported_parameter", param=f"{path}.type", reason=reason)


def _add_message(turns: Turns, item: dict[str, object], path: str) -> None:
    role = string_of(item, "role", path)
    if item.get("content") is None:
        raise error("missing_field", param=f"{path}.content")
    content = read_content(item["content"], f"{path}.content", role)
    if role in ("system", "developer"):
        turns.system("\n".join(filter(None, content.texts)))
    elif role == "user":
        turns.add_user(content)
    elif role == "assistant":
        turns.add_assistant(content)
    else:
        allowed = "user, assistant, system or developer"
        raise error("value_out_of_range", param=f"{path}.role", value=role[:64], allowed=allowed)


def _reasoning_of(item: Mapping[str, object], path: str) -> str:
    """Return the text of past reasoning; "" if it cannot be decoded, for example if it is from another server."""

    if item.get("content"):
        return _thoughts(item["content"], f"{path}.content")
    encrypted = item.get("encrypted_content")
    if isinstance(encrypted, str) and encrypted.startswith(_REASONING_MARK):
        try:
            return base64.b64decode(encrypted.removeprefix(_REASONING_MARK), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            reason = "it is not what the server returned"
            raise error("invalid_type", param=f"{path}.encrypted_content", reason=reason) from None
    return _thoughts(item.get("summary") or [], f"{path}.summary")


def _thoughts(content: object, path: str) -> str:
    """Return the text of reasoning, a string or a list of parts. Raises as ``read_content``."""
    read = read_content(content, path, "assistant")
    return "\n".join(filter(None, read.thoughts + read.texts))
