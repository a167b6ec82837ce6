"""Convert the messages and content blocks of a request to the messages of a chat request."""

from __future__ import annotations

from typing import Any

from aiakq.errors import error
from aiakq.server.api.turns import Turns, string_of, text_of, type_of

#: Prefix of the first block of Claude Code's system prompt, which differs in every request.
_BILLING_MARK = "x-anthropic-billing-header:"


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


def _add(turns: Turns, message: dict[str, Any], path: str) -> None:
    role, content, path = string_of(message, "role", path), message.get("content"), f"{path}.content"
    if content is None:
        raise error("missing_field", param=path)
    if role == "system":
        turns.system(_system_text(content, path))
    elif role not in ("user", "assistant"):
        param, allowed = path.removesuffix("content") + "role", "user, assistant or system"
        raise error("value_out_of_range", param=param, value=role[:64], allowed=allowed)
    elif isinstance(content, str):
        (turns.user if role == "user" else turns.answer)(content)
    elif not isinstance(content, list):
        raise error("invalid_type", param=path, reason="a string or a list of blocks is expected")
    elif role == "user":
        _add_user(turns, content, path)
    else:
        _add_assistant(turns, content, path)


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
    return text_of(content, path, _read_text)


def _add_user(turns: Turns, blocks: list[Any], path: str) -> None:
    """Add a user turn: each tool result as a separate message, text between them as user messages."""
    texts: list[str] = []
    for number, block in enumerate(blocks):
        block_path = f"{path}[{number}]"
        kind = type_of(block, block_path)
        if kind != "tool_result":
            texts.append(_read_text(block, kind, block_path))
            continue
        if texts:
            turns.user("\n".join(texts))
            texts = []
        content = block.get("content")
        result = "" if content is None else text_of(content, f"{block_path}.content", _read_text)
        turns.result(string_of(block, "tool_use_id", block_path), result)
    if texts or not blocks:
        turns.user("\n".join(texts))


def _add_assistant(turns: Turns, blocks: list[Any], path: str) -> None:
    """Add an assistant turn, without redacted thinking, which cannot be read."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, str, dict[str, Any]]] = []
    for number, block in enumerate(blocks):
        block_path = f"{path}[{number}]"
        kind = type_of(block, block_path)
        if kind == "thinking":
            thoughts.append(string_of(block, "thinking", block_path))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise error("invalid_type", param=f"{block_path}.input", reason="an object is expected")
            calls.append((string_of(block, "id", block_path), string_of(block, "name", block_path), arguments))
        elif kind != "redacted_thinking":
            texts.append(_read_text(block, kind, block_path))
    turns.reasoning("\n".join(thoughts))
    if texts or not calls:
        turns.answer("\n".join(texts))
    for call in calls:
        turns.call(*call)


def _read_text(block: dict[str, Any], kind: str, path: str) -> str:
    if kind != "text":
        raise error("unsupported_parameter", param=f"{path}.type", reason=f"{kind:.64}: only text is read")
    return string_of(block, "text", path)
