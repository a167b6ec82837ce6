"""Turns: the messages of a chat request, put together from the smaller parts that other APIs have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiakq.errors import error

#: Reads the text of one part of a content: the part, its type, and its path.
ReadPart = Callable[[dict[str, Any], str, str], str]


class Turns:
    """The messages of a conversation. What the assistant wrote in one go is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def system(self, text: str) -> None:
        """Add instructions. Those at the beginning are one message: many chat templates take only one."""
        if not text:
            return
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += "\n\n" + text
        else:
            self._add("system", content=text)

    def user(self, text: str) -> None:
        self._add("user", content=text)

    def reasoning(self, text: str) -> None:
        """Add reasoning, which begins a message unless the assistant has just begun one."""
        if text:
            self._assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def answer(self, text: str) -> None:
        self._assistant("content", "tool_calls")["content"] = text

    def call(self, id: str | None, name: str, arguments: str | dict[str, Any]) -> None:
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str | None, text: str) -> None:
        """Add what a call of a tool returned."""
        self._add("tool", content=text, tool_call_id=call_id)

    def _assistant(self, *absent: str) -> dict[str, Any]:
        """The assistant's message at the end if it has none of the fields ``absent``, or a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(name in last for name in absent):
            return self._add("assistant")
        return last

    def _add(self, role: str, **fields: Any) -> dict[str, Any]:
        self.messages.append({"role": role, **fields})
        return self.messages[-1]


def text_of(content: Any, path: str, read: ReadPart) -> str:
    """The text of a content, which is a text or a list of parts. Raises ``invalid_type``, and what ``read`` raises."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise error("invalid_type", param=path, reason="a string or a list of parts is expected")
    texts = []
    for number, part in enumerate(content):
        part_path = f"{path}[{number}]"
        texts.append(read(part, type_of(part, part_path), part_path))
    return "\n".join(text for text in texts if text)


def type_of(part: Any, path: str, default: str | None = None) -> str:
    """The field ``type`` of an object. Raises ``invalid_type`` and ``missing_field``."""
    if not isinstance(part, dict):
        raise error("invalid_type", param=path, reason="an object with a type is expected")
    kind = part.get("type", default)
    if kind is None:
        raise error("missing_field", param=f"{path}.type")
    if not isinstance(kind, str):
        raise error("invalid_type", param=f"{path}.type", reason="a string is expected")
    return kind


def string_of(part: dict[str, Any], name: str, path: str) -> str:
    """A field that is a text. Raises ``missing_field`` and ``invalid_type``."""
    value = part.get(name)
    if value is None:
        raise error("missing_field", param=f"{path}.{name}")
    if not isinstance(value, str):
        raise error("invalid_type", param=f"{path}.{name}", reason="a string is expected")
    return value
