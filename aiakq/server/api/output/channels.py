"""Channels of gpt-oss: analysis contains the reasoning, final the answer, and commentary the tool calls.

A message is <|channel|>NAME<|message|>text, up to <|end|>, <|return|> or <|call|>; <|start|>assistant comes before the
next one. A call has a recipient, to=functions.NAME, before or after the name of its channel, and JSON as its text.
Other text in a header, or in one without <|message|>, is text of the message: nothing that the model wrote is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from aiakq.server.api.output.events import EventSink, NoCall
from aiakq.server.api.output.json_text import MAX_NAME, arguments_value
from aiakq.server.api.output.scanner import Emit, Marks, Parsing, TextScanner

MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
#: What ends a message.
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")

_HEAD = Marks("<|message|>", *ENDS)
_END = Marks(*ENDS)
_FUNCTION = re.compile(rf"(?:^|\s)to=functions\.([^\s<]{{1,{MAX_NAME}}})")
#: The sender and the recipient at the beginning of a header.
_ROLE = r"(?:assistant|user|system|developer|tool|python|(?:functions|browser)\.[^\s<]+)(?=\s|\Z)"
_ROLES = re.compile(rf"\s*(?:{_ROLE})?\s*(?:to=[^\s<]+\s*)?")
#: Types of a text, also without a mark before them.
_BARE_TYPES = ("json", "code", "text", "python", "xml")
#: What may follow the name of a channel: a recipient, and the type of the text behind a mark of its own.
#: A word is a type if it is known as one, or if no other word follows.
_TYPE = rf"\s*(?:(?:{'|'.join(_BARE_TYPES)})(?=[\s<]|\Z)|[^\s<]*(?=\s*(?:<|\Z)))"
_TYPES = rf"(?:\s*(?:to=[^\s<]+|<\|constrain\|>(?:{_TYPE})?))*\s*"
_CHANNEL = re.compile(rf"\s*(?:(?!to=)[^\s<]+)?{_TYPES}")
_KNOWN_CHANNEL = re.compile(rf"\s*(?:(?:analysis|commentary|final)(?=[\s<]|\Z))?{_TYPES}")


class _Head(NamedTuple):
    """Header of a message. ``function`` is the tool that the message calls."""

    channel: str
    function: str = ""


def read_channels(
    text: TextScanner, output: EventSink, reasoning: Emit, *, in_analysis: bool, finds_calls: bool
) -> Parsing[None]:
    """Parse a complete message.

    reasoning    receives the text of the channel analysis.
    in_analysis  whether the message begins in that channel, whose mark is in the prompt.
    finds_calls  whether to parse tool calls; otherwise they are content.
    """

    def spare(channel: str, words: str) -> None:
        if channel != "analysis":
            output.content(words)
        elif words:
            reasoning(words)
            if output.has_reasoning:
                output.end_reasoning(text.num_bytes)

    head: _Head | None = _Head("analysis" if in_analysis else "final")
    if not in_analysis:
        spaces = yield from text.skip_spaces()
        begun = yield from text.match("<|channel|>", "<|start|>", "to=functions.")
        if begun:
            head = yield from _read_head(text, begun, spare)
        else:  # without a mark, the text is the answer
            output.content(spaces)
    while head is not None:
        is_reasoning = head.channel == "analysis" and not (head.function and finds_calls)
        if head.function and finds_calls:
            mark = yield from _read_call(text, output, head.function)
        else:
            mark = yield from text.until(_END, reasoning if is_reasoning else output.content)
        if is_reasoning and mark and output.has_reasoning:
            output.end_reasoning(text.num_bytes)
        head = (yield from _read_head(text, mark, spare)) if mark else None


def _read_head(text: TextScanner, begun: str, spare: Callable[[str, str], None]) -> Parsing[_Head | None]:
    """Parse the header of the next message; None if there is no further message.

    begun  what was read of it: a mark, or the beginning of its recipient.
    spare  receives the channel and words that do not belong to a header.
    """
    roles, pieces = "", [] if begun in ENDS else [begun]
    while True:
        mark = yield from text.until(_HEAD, pieces.append)
        words, pieces = "".join(pieces), []
        if begun == "<|channel|>":
            channel = (words.replace("<", " <").split() or ["final"])[0]
            spare(channel, _spare_words(roles, words) if mark == "<|message|>" else _behind(_KNOWN_CHANNEL, words))
        else:
            roles, channel = words, "final"
            rest = _behind(_ROLES, words)
            is_text = begun != "<|start|>" and (rest.strip() or not mark and begun not in ENDS)
            spare(channel, words if is_text else rest)
            roles = "" if is_text else roles
        if not mark:
            return None
        if mark == "<|message|>":
            function = _FUNCTION.search(roles if begun != "<|channel|>" else f"{roles} {words}")
            return _Head(channel, function[1] if function else "")
        roles, begun = roles if mark == "<|channel|>" else "", mark


def _spare_words(roles: str, words: str) -> str:
    """Return the text in ``words``, a header behind <|channel|>, that does not belong to it."""
    rest = _behind(_CHANNEL, words)
    is_type = len(rest.split()) == 1 and ("to=" in roles + words or rest.strip() in _BARE_TYPES)
    return "" if is_type or not rest.strip() else _behind(_KNOWN_CHANNEL, words)


def _behind(header: re.Pattern[str], words: str) -> str:
    """Return the text of ``words`` behind what belongs to a header; all of it if nothing does."""
    match = header.match(words)
    return words[match.end() :] if match and match[0].strip() else words if words.strip() else ""


def _read_call(text: TextScanner, output: EventSink, function: str) -> Parsing[str]:
    """Parse the arguments of a call and the mark after them, which is returned."""
    text.begin_part()
    try:
        output.start_call(function)
        yield from text.skip_spaces()
        complete = True
        if (yield from text.peek()) != "<":
            complete = yield from arguments_value(text, output.arguments)
        if complete or not text.is_exhausted:
            output.end_call()
    except NoCall:
        output.content(text.part())
    yield from text.skip_spaces()
    return (yield from text.until(_END, output.content, keep_rest=False))
