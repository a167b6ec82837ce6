"""Tools, calls and results written as text, for chat templates that have no place for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from aiakq.runtime.text.message_forms import appended, as_object, joined
from aiakq.runtime.text.template_facts import Messages, TemplateFacts


class CallSyntax(msgspec.Struct, frozen=True):
    """How the model is asked to write a call: a JSON object with the name and ``arguments_key``, between two marks."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"
    arguments_key: str = "arguments"

    def write(self, name: str, arguments: object) -> str:
        call = json.dumps({"name": name, self.arguments_key: arguments}, ensure_ascii=False)
        return f"{self.begin}{call}{self.end}"


#: The syntax of Hermes 2 and 3 and Qwen2.5, which many models have seen.
DEFAULT_SYNTAX = CallSyntax()


def without_tools(
    messages: Messages, tools: Sequence[object], facts: TemplateFacts, syntax: CallSyntax = DEFAULT_SYNTAX
) -> Messages:
    """Return messages for a template of these ``facts``, with what it has no place for as text.

    tools  listed in a system message, or in the first message of the user if the template takes no system messages;
           empty if there are none, or the template has a place for them.
    """
    if not facts.takes_calls and any("tool_calls" in message for message in messages):
        messages = [_with_calls_as_text(message, syntax) for message in messages]
    if facts.lacks("tool") and any(message.get("role") == "tool" for message in messages):
        messages = _with_results_of_users(messages)
    if not tools:
        return messages
    listing, messages = tool_listing(tools, syntax), list(messages)
    leading = messages[0].get("role") if messages else None
    if leading == "system":
        messages[0] = {**messages[0], "content": appended(messages[0].get("content"), listing)}
    else:
        messages.insert(0, {"role": "system", "content": listing})
    if facts.lacks("system"):
        messages[0] = {**messages[0], "role": "user"}
        if len(messages) > 1 and messages[1].get("role") == "user":
            messages[:2] = [_merged(messages[0], messages[1])]
    return messages


def tool_listing(tools: Sequence[object], syntax: CallSyntax = DEFAULT_SYNTAX) -> str:
    """Return the text that lists ``tools`` and says how to call them."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = syntax.write("name of the function", {"name of a parameter": "value"})
    return (
        f"You can call functions. These are their JSON definitions, one per line:\n{lines}\n\n"
        f"To call a function, write its name and its arguments as JSON like this:\n{example}\n"
        "Write one such block for each call, and no text after the last one. "
        "If no function is needed, answer without a call."
    )


def _with_calls_as_text(message: dict[str, Any], syntax: CallSyntax) -> dict[str, object]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    texts = [syntax.write(function["name"], as_object(function.get("arguments"))) for function in functions]
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**plain, "content": appended(message.get("content"), "\n".join(texts))}


def _with_results_of_users(messages: Messages) -> Messages:
    """Return the messages with results of calls as messages of the user, merged with those that follow them."""
    result: Messages = []
    is_open = False  # the last message came from a result
    for message in messages:
        role = message.get("role")
        if role == "tool":
            message = {"role": "user", "content": _in_marks(message.get("content"))}
        if is_open and message.get("role") == "user":
            result[-1] = _merged(result[-1], message)
        else:
            result.append(message)
        is_open = role == "tool" or (is_open and role == "user")
    return result


def _in_marks(content: object) -> object:
    begin, end = "<tool_response>\n", "\n</tool_response>"
    if isinstance(content, list):
        return [{"type": "text", "text": begin}, *content, {"type": "text", "text": end}]
    return f"{begin}{content or ''}{end}"


def _merged(first: dict[str, object], second: dict[str, object]) -> dict[str, object]:
    return {**first, "content": joined(first.get("content"), second.get("content"))}
