"""Turns: build the messages of a chat request from the finer-grained parts of other APIs."""

from __future__ import annotations

from aiakq.runtime.text.message_parts import Content, read_content


class Turns:
    """The messages of a conversation. Consecutive parts of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, object]] = []

    def system(self, text: str) -> None:
        """Add instructions. Initial ones are merged, because many chat templates accept only one system message."""
        if not text:
            return
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] = f"{self.messages[0]['content']}\n\n{text}"
        else:
            self._add("system", content=text)

    def user(self, text: str) -> None:
        self._add("user", content=text)

    def reasoning(self, text: str) -> None:
        """Add reasoning, which starts a new message unless the assistant's last one has no content yet."""
        if text:
            self._assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def answer(self, text: str) -> None:
        self._assistant("content", "tool_calls")["content"] = text

    def call(self, id: str | None, name: str, arguments: str | dict[str, object]) -> None:
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        calls = self._assistant().setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(call)

    def result(self, call_id: str | None, text: str) -> None:
        """Add the result of a tool call."""
        self._add("tool", content=text, tool_call_id=call_id)

    def add_user(self, content: Content) -> None:
        """Add a user's message: each result as a message of its own, the text between them as messages of the user."""
        begin = 0
        if content.media and not content.results:
            self._add("user", content=content.parts())
            return
        for call_id, result, position in content.results:
            if position > begin:
                self.user(_joined(content.texts[begin:position]))
                begin = position
            self.result(call_id, result)
        if content.media:
            self._add("user", content=content.parts(begin))
        elif content.texts[begin:] or not content.results:
            self.user(_joined(content.texts[begin:]))

    def add_assistant(self, content: Content) -> None:
        """Add an answer, without redacted thinking, which cannot be read."""
        self.reasoning("\n".join(content.thoughts))
        if content.texts or not content.calls:
            self.answer(_joined(content.texts))
        for call in content.calls:
            self.call(*call)

    def _assistant(self, *absent: str) -> dict[str, object]:
        """Return the last message if it is the assistant's and has none of the fields ``absent``, else a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(name in last for name in absent):
            return self._add("assistant")
        return last

    def _add(self, role: str, **fields: object) -> dict[str, object]:
        self.messages.append({"role": role, **fields})
        return self.messages[-1]


def text_of(content: object, path: str) -> str:
    """Return the text of a content, a string or a list of nothing but texts. Raises as ``read_content``."""
    return _joined(read_content(content, path, "system").texts)


def _joined(texts: list[str]) -> str:
    return "\n".join(filter(None, texts))
