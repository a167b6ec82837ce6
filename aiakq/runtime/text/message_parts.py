"""Read the content of messages: text under the names of several APIs, reasoning, and calls and results as parts.

Clients send back what they received, from whichever API it was, so that the parts of all of them are read everywhere.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiakq.errors import error, first_line
from aiakq.runtime.protocol.media import PLURALS, MediaKind
from aiakq.runtime.protocol.unicode_text import has_surrogates
from aiakq.runtime.text.media_parts import MEDIA_PARTS, MediaPart, media_part, take_media

#: Type of a part with text -> the field of its text.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
#: Type of a part with reasoning -> fields of its text, of which the first that is there is read.
_REASONING_PARTS = {
    "thinking": ("thinking", "text"),
    "reasoning": ("text", "reasoning", "reasoning_text", "content", "summary"),
    "reasoning_text": ("text",),
    "summary_text": ("text",),
}
#: Keys of messages that are already in the form of ``read_message``.
_PLAIN = frozenset({"role", "content", "name", "tool_call_id"})
#: Reasoning that only the server that wrote it can read.
_UNREADABLE = ("redacted_thinking", "redacted_reasoning")
#: Fields with the reasoning of other servers' answers, lists of parts; the same text is usually in ``reasoning``.
_REASONING_LISTS = ("thinking_blocks", "reasoning_details")
#: What messages may have besides text -> the roles that have it. Roles with other names may have everything.
_HOLDERS = {"reasoning": ("assistant",), "calls": ("assistant",), "results": ("user", "tool", "function")}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
#: Fields of a message that are texts.
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")
#: Fields of a message -> what they hold.
_HELD_BY_FIELDS = {
    **dict.fromkeys(("reasoning_content", "reasoning", *_REASONING_LISTS), "reasoning"),
    **dict.fromkeys(("tool_calls", "function_call"), "calls"),
}


#: Type of a part -> what it holds besides text.
_HELD_BY_PARTS = {
    **dict.fromkeys((*_REASONING_PARTS, *_UNREADABLE), "reasoning"),
    "tool_use": "calls",
    "tool_result": "results",
}
#: The escape of a surrogate in JSON, or one itself.
_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


@dataclass
class Content:
    """The parts of a message's content.

    texts     its text, one entry per part.
    thoughts  its reasoning, one entry per part.
    calls     (id, name, arguments) of its calls.
    results   (id of the call, text, number of texts before it) of its results.
    media     (image, video or audio, number of texts before it).
    is_list   whether it was given as a list.
    """

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[tuple[str | None, str, Any]] = field(default_factory=list)
    results: list[tuple[str | None, str, int]] = field(default_factory=list)
    media: list[tuple[MediaPart, int]] = field(default_factory=list)
    is_list: bool = False

    @property
    def value(self) -> Any:
        """The text as a string, or as parts if it was given as a list; see ``parts``."""
        return self.parts() if self.is_list and (self.texts or self.media) else "\n".join(self.texts)

    def parts(self, begin: int = 0, end: int | None = None) -> list[dict[str, Any]]:
        """Return the texts ``begin`` .. ``end - 1`` as parts of type text, with those of its media among them.

        One between two such ranges belongs to the later one.
        """
        is_last = end is None or end == len(self.texts)
        end = len(self.texts) if end is None else end
        parts: list[dict[str, Any]] = []
        for number in range(begin, end + 1):
            if number < end or is_last:
                parts += [{"type": each.media, each.media: each} for each, before in self.media if before == number]
            if number < end:
                parts += as_parts([self.texts[number]])
        return parts


def as_parts(texts: list[str]) -> list[dict[str, str]]:
    """Return ``texts`` as parts of type text."""
    return [{"type": "text", "text": text} for text in texts]


def read_content(content: object, path: str, role: str) -> Content:
    """Read the content of a message of ``role``: null, a string or a list of parts.

    path  its path in the request, for errors.

    Raises ``invalid_type``, ``missing_field``, and ``unsupported_parameter`` for parts that messages of this role do
    not have: anything but text, reasoning and calls of the assistant, and results.
    """
    if content is None:
        return Content()
    if isinstance(content, str):
        return Content([content])
    if isinstance(content, dict):  # a part that is not in a list
        content = [content]
    if not isinstance(content, list):
        raise error("invalid_type", param=path, reason="a string or a list of parts is expected")
    read = Content(is_list=True)
    for number, part in enumerate(content):
        _read_part(read, part, f"{path}[{number}]", role)
    return read


def join_text_parts(content: object, path: str, role: str = "") -> str:
    """Return the text of a message's content; "" if it is absent. Raises as ``read_content``."""
    return "\n".join(read_content(content, path, role).texts)


def read_message(message: dict[str, Any], path: str) -> list[dict[str, object]]:
    """Return a message in the form of chat messages, whose content is a string or a list of parts of type text.

    Reasoning becomes ``reasoning_content``, and parts with calls ``tool_calls``. Parts with results become messages
    of role tool. The deprecated fields and roles of OpenAI's API become the current ones. Raises as ``read_content``,
    and ``invalid_type`` and ``missing_field`` for fields of another type.
    """
    _check_types(message, path)
    if isinstance(message.get("content"), str) and message.get("role") != "function" and _PLAIN.issuperset(message):
        return [message]
    role = message["role"]
    for name, held in _HELD_BY_FIELDS.items():
        if message.get(name):
            _check_holder(held, role, f"{path}.{name}", name)
    content = read_content(message.get("content"), f"{path}.content", role)
    refusal = message.get("refusal")
    if isinstance(refusal, str) and refusal and refusal not in content.texts:
        content.texts.append(refusal)
    read = {name: value for name, value in message.items() if name not in ("content", "refusal", "function_call")}
    read = {"role": read.pop("role", None), "content": content.value, **read}
    if not (read.get("reasoning_content") or read.get("reasoning")):
        if thoughts := content.thoughts or _listed_thoughts(message):
            read["reasoning_content"] = "\n".join(thoughts)
    if reasoning := read.get("reasoning_content") or read.get("reasoning"):
        read["reasoning_content"] = read["reasoning"] = reasoning
    calls = list(read.get("tool_calls") or ()) + [_call(*each) for each in content.calls]
    function = message.get("function_call")
    if not calls and function:
        calls = [{"type": "function", "function": {"arguments": None, **function}}]
    read.pop("tool_calls", None)
    for number, call in enumerate(calls):
        check_keys(call["function"].get("arguments"), f"{path}.tool_calls[{number}].function.arguments")
    if calls:
        read["tool_calls"], read["content"] = calls, read["content"] or None
    if read["role"] == "function":
        read["role"] = "tool"
    if not content.results:
        return [read]
    return _with_results(read, content)


def read_messages(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the messages of a conversation as ``read_message`` does. Raises as it."""
    return [each for number, message in enumerate(messages) for each in read_message(message, f"messages[{number}]")]


def read_conversation(
    messages: list[dict[str, object]], placeholders: Mapping[MediaKind, str]
) -> list[dict[str, object]]:
    """Return the messages as ``read_messages`` does, with parts of type image, video and audio that have no source.

    Raises as it, and ``unsupported_parameter`` for media without one of the ``placeholders`` by kind.
    """
    read, media = take_media(read_messages(messages))
    for each in media:
        if not placeholders.get(each.media):
            raise each.refused("only text is read")
    return read


def media_in(messages: list[dict[str, object]]) -> list[MediaPart]:
    """Return the images, videos and audios of a conversation, in order. Raises as ``read_messages``."""
    return take_media(read_messages(messages))[1]


def _check_types(message: dict[str, object], path: str) -> None:
    """Raise ``invalid_type`` or ``missing_field`` for a field of another type than in chat requests."""
    string_of(message, "role", path)
    for name in _TEXTS:
        if message.get(name) is not None:
            string_of(message, name, path)
    if message.get("function_call"):
        _check_called(message["function_call"], f"{path}.function_call")
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise error("invalid_type", param=f"{path}.tool_calls", reason="a list of calls is expected")
    for number, call in enumerate(calls):
        place = f"{path}.tool_calls[{number}]"
        if not isinstance(call, dict):
            raise error("invalid_type", param=place, reason="an object with type and function is expected")
        if call.get("function") is None:
            raise error("missing_field", param=f"{place}.function")
        _check_called(call["function"], f"{place}.function")


def _check_called(function: object, path: str) -> None:
    """Raise ``invalid_type`` or ``missing_field`` unless a called function has a name, and text or an object for it."""
    if not isinstance(function, dict):
        raise error("invalid_type", param=path, reason="an object with name and arguments is expected")
    string_of(function, "name", path)
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, (str, dict)):
        raise error("invalid_type", param=f"{path}.arguments", reason="a string or an object is expected")


def described_tools(tools: object) -> list[dict[str, object]]:
    """Return ``tools`` as objects: functions as transformers describes them from annotations and docstrings.

    Raises ``invalid_type`` for anything else, and for a function that it cannot describe.
    """
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise error("invalid_type", param="tools", reason="a list of tools is expected")
    return [_described_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools or ())]


def _described_tool(tool: object, path: str) -> dict[str, object]:
    if isinstance(tool, dict):
        return tool
    if not inspect.isfunction(tool) and not inspect.ismethod(tool):
        reason = "an object with type and function, or a Python function is expected"
        raise error("invalid_type", param=path, reason=reason)
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        described = get_json_schema(tool)
        json.dumps(described)
        return described
    except Exception as failure:  # its own exceptions, and those of annotations
        reason = f"the function cannot be described: {first_line(failure).rstrip('.!')[:200]}"
        raise error("invalid_type", param=path, reason=reason) from failure


def _with_results(message: dict[str, object], content: Content) -> list[dict[str, object]]:
    """Return the results of ``content`` as messages, with the texts around them as messages in between."""
    messages: list[dict[str, object]] = []
    begin = 0
    for call_id, text, position in [*content.results, (None, "", len(content.texts))]:
        is_last = position == len(content.texts) and call_id is None
        if position > begin or (is_last and any(before >= begin for _, before in content.media)):
            messages.append({**message, "content": content.parts(begin, position)})
            begin = position
        messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
    return messages[:-1]


def check_keys(arguments: object, path: str) -> None:
    """Raise ``invalid_type`` if the arguments of a call, as JSON text, have a name with half of a character in it.

    In the other texts it becomes U+FFFD, but another name could be meant.
    """
    if not isinstance(arguments, str) or not _HALF.search(arguments):
        return
    try:
        left = [json.loads(arguments, strict=False)]
    except (ValueError, RecursionError):
        return
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if any(map(has_surrogates, value)):
                reason = "a name in it is not Unicode: it has half of a character (a lone surrogate)"
                raise error("invalid_type", param=path, reason=reason)
            left += value.values()
        elif isinstance(value, list):
            left += value


def _listed_thoughts(message: dict[str, object]) -> list[str]:
    """Return the texts of the first of ``_REASONING_LISTS`` that has some."""
    for name in _REASONING_LISTS:
        parts = message.get(name)
        parts = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        texts = [part.get(key) for part in parts for key in ("thinking", "text", "summary")]
        if found := [text for text in texts if isinstance(text, str) and text]:
            return found
    return []


def _check_holder(held: str, role: str, param: str, name: str) -> None:
    """Raise ``unsupported_parameter`` if messages of ``role`` do not have what is ``held`` by the part or field."""
    if role in _ROLES and role not in _HOLDERS[held]:
        roles = " or ".join(_HOLDERS[held][:2])
        reason = f"{name:.64}: only messages of the role {roles} have {held}"
        raise error("unsupported_parameter", param=param, reason=reason)


def _call(id: str | None, name: str, arguments: object) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if id is None else {"id": id, **call}


def _read_part(read: Content, part: object, path: str, role: str) -> None:
    if isinstance(part, str):
        read.texts.append(part)
        return
    if not isinstance(part, dict):
        raise error("invalid_type", param=path, reason="a string or an object with a type is expected")
    kind = type_of(part, path, default="text" if "text" in part else None)
    if held := _HELD_BY_PARTS.get(kind):
        _check_holder(held, role, f"{path}.type", kind)
    if kind in TEXT_PARTS:
        read.texts.append(string_of(part, TEXT_PARTS[kind], path))
    elif kind in _REASONING_PARTS:
        read.thoughts += _thoughts(part, _REASONING_PARTS[kind], path)
    elif kind == "tool_use":
        arguments = part.get("input")
        if not isinstance(arguments, dict):
            raise error("invalid_type", param=f"{path}.input", reason="an object is expected")
        read.calls.append((string_of(part, "id", path), string_of(part, "name", path), arguments))
    elif kind == "tool_result":
        text = join_text_parts(part.get("content"), f"{path}.content", "system")  # nothing but text
        read.results.append((string_of(part, "tool_use_id", path), text, len(read.texts)))
    elif kind in MEDIA_PARTS and role in ("user", ""):
        read.media.append((media_part(part, kind, path), len(read.texts)))
    elif kind in MEDIA_PARTS:
        named = PLURALS[MEDIA_PARTS[kind]]
        raise media_part(part, kind, path).refused(f"only text is read here; {named} are in messages of users")
    elif kind not in _UNREADABLE:
        raise error("unsupported_parameter", param=f"{path}.type", reason=f"{kind:.64}: only text is read")


def _thoughts(part: dict[str, object], names: tuple[str, ...], path: str) -> list[str]:
    """Return the texts of a part with reasoning, which may be in a list; none if it has only encrypted ones."""
    name = next((name for name in names if part.get(name) is not None), None)
    if name is None:
        if part.get("type") == "reasoning":
            return []
        raise error("missing_field", param=f"{path}.{names[0]}")
    value = part[name]
    if isinstance(value, list):
        inner = read_content(value, f"{path}.{name}", "assistant")
        return inner.thoughts + inner.texts
    return [string_of(part, name, path)]


def type_of(part: object, path: str, default: str | None = None) -> str:
    """Return the field ``type`` of an object. Raises ``invalid_type`` and ``missing_field``."""
    if not isinstance(part, dict):
        raise error("invalid_type", param=path, reason="an object with a type is expected")
    kind = part.get("type", default)
    if kind is None:
        raise error("missing_field", param=f"{path}.type")
    if not isinstance(kind, str):
        raise error("invalid_type", param=f"{path}.type", reason="a string is expected")
    return kind


def string_of(part: dict[str, object], name: str, path: str) -> str:
    """Return a string field. Raises ``missing_field`` and ``invalid_type``."""
    value = part.get(name)
    if value is None:
        raise error("missing_field", param=f"{path}.{name}")
    if not isinstance(value, str):
        raise error("invalid_type", param=f"{path}.{name}", reason="a string is expected")
    return value
