"""Conversations of calibration data, in the forms of many data sets, as messages with a role and a content.

Roles have the names of ShareGPT and its relatives, of the APIs and of data sets of chats; a conversation may also be a
list of turns (a question and its answer), of texts that alternate, or JSON or a Python literal in a text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from aiakq.data.files import bad, decoded_json, decoded_literal

Message = dict[str, Any]

#: Columns with a conversation.
TALKS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue", "contents", "data")
#: Names of the fields of a message, in their order of preference.
_ROLE_KEYS = ("role", "from", "speaker", "sender", "author")
_CONTENT_KEYS = ("content", "value", "text", "message", "utterance", "parts")
#: Names of a question and its answer in one turn.
_ASKING = ("input", "user", "human", "question", "prompt", "instruction", "query")
_ANSWERING = ("output", "assistant", "gpt", "bot", "moss", "answer", "response", "completion")
_CALL, _FUNCTION = "function_call", "function"
#: Names of roles in data sets -> those of chat templates; others stay as they are.
_ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "usr", "customer", "client"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "gpt4", "gpt_4", "bing", "bard", "claude", "model"), "assistant"),
    **dict.fromkeys(("bot", "ai", "chatbot", "agent", "llm", "moss"), "assistant"),
    **dict.fromkeys(("tool", "observation", "tool_response", "function_response", "tool_result"), "tool"),
    **dict.fromkeys(("tool_output", "function_result", "function_output", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call", "functioncall", "toolcall"), _CALL),
    **dict.fromkeys(("system", "sys"), "system"),
    "developer": "developer",
    "function": _FUNCTION,
}
#: A text that stands for no value, as pandas and SQL write it.
_NO_VALUES = frozenset({"nan", "<na>", "nat", "null", "none"})
#: The beginning of a printed list of messages.
_PRINTED = re.compile(r"""\s*(array\()?\[?\s*(array\()?\[?\s*\{\s*['"](role|from|content|value)['"]\s*:""")


class NoTextError(Exception):
    """A row that is left out, because its text or a part of it is missing."""


def is_missing(value: object) -> bool:
    """Whether a cell has no value: null, NaN, an empty list, a text without characters, or the word for one of them."""
    if isinstance(value, str):
        return not value or value.isspace() or (len(value) < 8 and value.strip().lower() in _NO_VALUES)
    return value is None or (isinstance(value, float) and math.isnan(value)) or (isinstance(value, list) and not value)


def is_conversation(value: object) -> bool:
    """Whether a value is one list of messages rather than several documents."""
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        return False
    fields = ("content", "value", "parts", "tool_calls", _CALL)
    if any("role" not in item and "from" not in item for item in value):
        return False
    return any(name in item for item in value for name in fields)


def stored_talk(value: object, source: str, where: str, named: bool) -> object:
    """Return a cell with a conversation as a list, of which ``messages_of`` makes messages; any other as it is.

    named  whether the column has a name of TALKS: its lists need no roles.
    Raises ``calibration`` for a conversation that was printed, not written, and cannot be read back.
    """
    if isinstance(value, str):
        return _talk_in_text(value, source, where, named)
    if isinstance(value, Mapping):
        inner = next((value[name] for name in TALKS if isinstance(value.get(name), list)), None)
        if inner is not None and len(value) <= 8:
            return inner
        columns = list(value.values())
        if columns and all(isinstance(column, list) for column in columns):
            if len({len(column) for column in columns}) > 1:
                raise bad(source, f"{where} has a conversation whose fields have different numbers of entries")
            return [dict(zip(value, entries, strict=True)) for entries in zip(*columns, strict=True)]
        if any(name in value for name in ("role", "from")):
            return [value]
        if named and value and all(isinstance(turn, Mapping) for turn in columns):  # turn_1, turn_2, ...
            return columns
    return value


def _talk_in_text(text: str, source: str, where: str, named: bool) -> object:
    if text.lstrip()[:1] not in ("[", "{") and not _PRINTED.match(text):
        return text
    printed = _PRINTED.match(text)
    value = decoded_literal(text) if named or printed else decoded_json(text)
    if isinstance(value, Mapping):
        value = stored_talk(value, source, where, named)
    if isinstance(value, tuple):
        value = list(value)
    if is_conversation(value) or (named and isinstance(value, list)):
        return value
    if printed and value is None:
        reason = f"{where} has messages that were printed instead of written as JSON"
        raise bad(source, reason, "Write the column with json.dumps, or the table as JSON lines or Parquet.")
    return text


def messages_of(value: Sequence[object], source: str, where: str) -> tuple[Message, ...]:
    """Convert a conversation to the names that chat templates expect; other fields of messages are kept.

    Raises ``calibration``, and NoTextError for a message without content.
    """
    items = list(value)
    if len(items) > 1 and all(isinstance(item, str) for item in items):
        items = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(items)]
    result: list[Message] = []
    for number, item in enumerate(items, 1):
        at = f"{where}, message {number}"
        if isinstance(item, list | tuple) and len(item) == 2:  # a question and its answer
            item = {"input": item[0], "output": item[1]}
        if not isinstance(item, Mapping):
            raise bad(source, f"{at} is no JSON object")
        turn = _turn(item)
        result += turn or [_message(item, source, at)]
    if not result:
        raise NoTextError
    return tuple(_resolved(result))


def _turn(item: Mapping[str, object]) -> list[Message]:
    """Return the two messages of a turn with a question and its answer; none for a message."""
    if any(name in item for name in ("role", "from", "speaker")):
        return []
    names = {str(name).lower(): name for name in item}
    asking = next((names[name] for name in _ASKING if name in names), None)
    answering = next((names[name] for name in _ANSWERING if name in names), None)
    if asking is None or answering is None:
        return []
    turn = (("user", item[asking]), ("assistant", item[answering]))
    return [{"role": role, "content": text} for role, text in turn if isinstance(text, str) and text]


def _message(item: Mapping[str, object], source: str, at: str) -> Message:
    """Return a message with a role and a content; its other fields are kept if they have a value."""
    message = {str(key): entry for key, entry in item.items() if not _is_null(entry)}
    role_key = next((name for name in _ROLE_KEYS if name in message), None)
    role = message.pop(role_key) if role_key is not None else None
    if isinstance(role, Mapping):
        role = role.get("role")
    if not isinstance(role, str):
        raise bad(source, f"{at} has no role")
    content_key = next((name for name in _CONTENT_KEYS if name in message), None)
    content = message.pop(content_key) if content_key is not None else None
    role = role_of(role)
    calls = _calls(content) if role == _CALL else []
    if calls:
        message, content = {**message, "tool_calls": calls}, ""
    if content is None:
        if not any(message.get(name) for name in ("tool_calls", _CALL)):
            raise NoTextError
        content = ""
    return {**message, "role": role, "content": _content(content, source, at)}


def role_of(name: str) -> str:
    """Return the role that chat templates know for a name of one, or the name itself."""
    plain = name.strip().rstrip(":").lower()
    return _ROLES.get(re.sub(r"[\s-]+", "_", plain), name)


def _content(content: object, source: str, at: str) -> Any:
    """Return a content as a text or a list of parts, which the reader of messages checks."""
    if isinstance(content, Mapping):
        content = content.get("parts", [content])
    if isinstance(content, str) and content.startswith("[{"):
        parts = decoded_json(content)
        if isinstance(parts, list) and all(isinstance(part, Mapping) and "type" in part for part in parts):
            content = parts
    if isinstance(content, str):
        return sound(content, source, at)
    if not isinstance(content, list) or not content:
        raise bad(source, f"{at} has no text as its content")
    parts = []
    for part in content:
        if isinstance(part, Mapping):
            part = {str(key): entry for key, entry in part.items() if not _is_null(entry)}
            kind = part.get("type", "text" if "text" in part else next(iter(part), "nothing"))
            if kind in ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url"):
                raise bad(source, f"{at} has a part of type {kind}; only text is calibrated", "Leave such rows out.")
            part = {"type": kind, **part}
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise bad(source, f"{at} has no text as its content")
        if isinstance(part.get("text"), str):
            sound(part["text"], source, at)
        parts.append(part)
    if all(part.keys() <= {"type", "text"} and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def sound(text: str, source: str, where: str) -> str:
    """Return ``text`` if UTF-8 can encode it: JSON can contain lone surrogates, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad(source, f"{where} holds half a character") from None
    return text


def _is_null(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


# --- calls ------------------------------------------------------------------------------------------------------------


def _calls(content: Any) -> list[Message]:
    """Return the calls that a message of the role function_call has as JSON or as an object; none if it has others."""
    value = decoded_literal(content) if isinstance(content, str) else content
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        return []
    return [
        {
            "type": "function",
            "function": {"name": call["name"], "arguments": call.get("arguments", call.get("parameters", {}))},
        }
        for call in calls
    ]


def _resolved(messages: list[Message]) -> list[Message]:
    """Return the messages with ``function_call`` as the assistant's role, and ``function`` as a call or its result.

    ``function`` is a call where another role has the results, or where the user spoke last.
    """
    has_results = any(message["role"] == "tool" for message in messages)
    result: list[Message] = []
    for message in messages:
        role = message["role"]
        if role == _FUNCTION:
            after_user = not result or result[-1]["role"] in ("user", "system")
            role = _CALL if has_results or after_user else "tool"
            calls = _calls(message["content"]) if role == _CALL else []
            if calls:
                message = {**message, "tool_calls": calls, "content": ""}
        result.append({**message, "role": "assistant" if role == _CALL else role})
    return result


def tools_of(value: object) -> list[object] | None:
    """Return the tools of a column, a list or its JSON, as OpenAI writes them; None if they are not readable."""
    if isinstance(value, str):
        value = decoded_literal(value)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        value = [decoded_json(tool) if isinstance(tool, str) else tool for tool in value]
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        return None
    tools = [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in value]
    if all(isinstance(tool["function"], Mapping) and isinstance(tool["function"].get("name"), str) for tool in tools):
        plain: list[object] = json.loads(json.dumps(tools, default=str))
        return plain
    return None
