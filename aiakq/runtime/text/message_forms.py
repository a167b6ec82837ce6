"""Variants of a conversation's tool calls and system messages, for chat templates with different conventions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple


class CallForm(NamedTuple):
    """How a message with calls is passed to a template.

    content    what stands for the content of a message without text: null, an empty text, or no content at all.
    as_object  whether the arguments of calls are objects instead of their JSON text.
    """

    content: Literal["null", "empty", "absent"]
    as_object: bool


#: Roles whose messages are instructions.
INSTRUCTING = ("system", "developer")
#: Fields with the reasoning of a message, under the names that templates read.
REASONING = frozenset({"reasoning_content", "reasoning", "thinking"})
CALL_FORMS = tuple(itertools.starmap(CallForm, itertools.product(("null", "empty", "absent"), (True, False))))


def message_forms(
    messages: list[dict[str, object]], preferred: CallForm = CALL_FORMS[0]
) -> Iterator[list[dict[str, object]]]:
    """Yield variants of ``messages`` to try in order, until the template accepts one.

    Templates differ in the form of messages with calls: ``preferred`` comes first. Many accept instructions only at the
    beginning, for which see ``folded``. Absent fields are omitted, because templates test for them, except the content
    of messages without calls, which they do not.
    """
    compact = [_compact(message) for message in messages]
    yield from _call_forms(compact, preferred)
    if any(message.get("role") in INSTRUCTING for message in compact[1:]):
        yield from _call_forms(folded(compact), preferred)


def _compact(message: dict[str, object]) -> dict[str, object]:
    """Return the message without absent fields."""
    given = {name: value for name, value in message.items() if value is not None}
    return given if "tool_calls" in given or "content" in given else {**given, "content": ""}


def without_leading_systems(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the messages with all system messages merged into the messages of users at their position."""
    return folded([{"role": "assistant"}, *messages])[1:]


def joined_text(content: Any) -> str:
    """Return the text of a message's content, a string or a list of parts with text."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return content or ""


def appended(content: object, text: str) -> object:
    """Return a message's content, a string or a list of parts, with a paragraph added to its end."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n\n{text}" if content else text


def _call_forms(messages: list[dict[str, object]], preferred: CallForm) -> Iterator[list[dict[str, object]]]:
    if not any("tool_calls" in message for message in messages):
        yield messages
        return
    for form in (preferred, *(each for each in CALL_FORMS if each != preferred)):
        yield [_with_calls(message, form) for message in messages]


def folded(originals: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the messages with instructions, which systems and developers give, only in the first message.

    Those that follow it are appended to it. Later ones are merged into the message of the user at their position, so
    that the prefix of a conversation stays the same after each turn.
    """
    messages = originals[:1]
    is_open = False  # the last message came from instructions, and the next user message is appended to it
    for message in originals[1:]:
        role, last = message.get("role"), messages[-1]
        instructs = role in INSTRUCTING
        joins = last.get("role") in ("user", "tool", *INSTRUCTING) if instructs else is_open and role == "user"
        if joins:
            messages[-1] = _merged(last, message)
            is_open = is_open and instructs
        else:
            messages.append({**message, "role": "user"} if instructs else message)
            is_open = instructs
    return messages


def with_users_merged(originals: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the messages with those of the user in a row as one."""
    messages: list[dict[str, object]] = []
    for message in originals:
        if messages and message.get("role") == "user" == messages[-1].get("role"):
            messages[-1] = _merged(messages[-1], message)
        else:
            messages.append(message)
    return messages


def with_single_calls(originals: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Return the messages with one call in each, which its result follows."""
    messages: list[dict[str, object]] = []
    for number, message in enumerate(originals):
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            messages.append(message)
            continue
        results = list(itertools.takewhile(lambda each: each.get("role") == "tool", originals[number + 1 :]))
        for place, call in enumerate(calls):
            messages.append({**(message if place == 0 else {"role": message.get("role")}), "tool_calls": [call]})
            found = [each for each in results if each.get("tool_call_id") == call.get("id")]
            messages += found if call.get("id") is not None else results[place : place + 1]
    return _without_repeats(messages)


def _without_repeats(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the messages without results that were moved to their calls before."""
    seen: set[int] = set()
    kept = []
    for message in messages:
        if message.get("role") != "tool" or id(message) not in seen:
            kept.append(message)
        seen.add(id(message))
    return kept


def with_text_before_calls(originals: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the messages with the text of those that have calls in a message of its own before."""
    messages: list[dict[str, object]] = []
    for message in originals:
        if message.get("tool_calls") and message.get("content"):
            messages.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": message.get("role"), "tool_calls": message["tool_calls"]}
        messages.append(message)
    return messages


def with_texts_apart(originals: list[dict[str, object]], numbers: Collection[int]) -> list[dict[str, object]]:
    """Return the messages with the texts of some, given by ``numbers``, in messages of their own before.

    Reasoning stays with the calls, because some templates show it only there.
    """
    messages: list[dict[str, object]] = []
    for number, message in enumerate(originals):
        if number in numbers:
            messages.append({"role": message.get("role"), "content": message["content"]})
            message = {name: value for name, value in message.items() if name != "content"}
        messages.append(message)
    return messages


def texts_beside_calls(messages: list[dict[str, object]]) -> list[int]:
    """Return the numbers of messages with text and calls."""
    return [number for number, each in enumerate(messages) if each.get("tool_calls") and each.get("content")]


def with_texts_joined(originals: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the messages with the assistant's texts between two of the user as one, at the place of the last."""
    messages: list[dict[str, object]] = []  # from the last one to the first
    place: int | None = None
    for message in reversed(originals):
        if message.get("role") == "assistant" and not message.get("tool_calls"):
            if place is not None:
                messages[place] = {**messages[place], **_merged(message, messages[place])}
                continue
            place = len(messages)
        elif message.get("role") not in ("assistant", "tool"):
            place = None
        messages.append(message)
    return messages[::-1]


def _merged(first: dict[str, object], second: dict[str, object]) -> dict[str, object]:
    return {**first, "content": joined(first.get("content"), second.get("content"))}


def joined(first: Any, second: Any) -> object:
    """Return two contents as one: a string if both are, else a list of parts."""
    if not first or not second or (isinstance(first, str) and isinstance(second, str)):
        return appended(first, second) if first and second else first or second or ""
    lists = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second))
    return [part for parts in lists for part in parts]


def _with_calls(message: dict[str, Any], form: CallForm) -> dict[str, object]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        converted = as_object(arguments) if form.as_object else as_text(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": converted}})
    given = {**message, "tool_calls": calls}
    if message.get("content"):
        return given
    if form.content == "absent":
        given.pop("content", None)
        return given
    return {**given, "content": None if form.content == "null" else ""}


def as_object(arguments: Any) -> dict[str, object]:
    """Return arguments as an object. Invalid JSON becomes the value of "arguments", so that it does not end a chat."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}", strict=False)
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else {"arguments": arguments}
    return arguments or {}


def as_text(arguments: object) -> str:
    """Return the arguments of a call as JSON text."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
