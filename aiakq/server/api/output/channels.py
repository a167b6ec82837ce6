"""Channels of gpt-oss: analysis contains the reasoning, final the answer, and commentary the tool calls.

A message is <|channel|>NAME<|message|>text, up to <|end|>, <|return|> or <|call|>; <|start|>assistant comes before the
next one. A call has a recipient, to=functions.NAME, before or after the name of its channel, and JSON as its text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from aiakq.server.api.output.events import EventSink, NoCall
from aiakq.server.api.output.json_text import MAX_NAME, arguments_value
from aiakq.server.api.output.scanner import Emit, Marks, Parsing, TextScanner

MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
#: What ends a message.
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")

_HEAD = Marks("<|channel|>", "<|message|>")
_TEXT = Marks("<|message|>")
_END = Marks(*ENDS)
_FUNCTION = re.compile(rf"(?:^|\s)to=functions\.([^\s<]{{1,{MAX_NAME}}})")


class _Head(NamedTuple):
    """Header of a message. ``function`` is the tool that the message calls."""

    channel: str
    function: str


def read_channels(
    text: TextScanner, output: EventSink, reasoning: Emit, *, in_analysis: bool, finds_calls: bool
) -> Parsing[None]:
    """Parse a complete message.

    reasoning    receives the text of the channel analysis.
    in_analysis  whether the message begins in that channel, whose mark is in the prompt.
    finds_calls  whether to parse tool calls; otherwise they are content.
    """
    head: _Head | None = _Head("analysis" if in_analysis else "final", "")
    if not in_analysis:
        spaces = yield from text.skip_spaces()
        if (yield from text.match("<|channel|>", "<|start|>")):
            head = yield from _read_head(text, output)
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
        head = (yield from _read_head(text, output)) if mark else None


def _read_head(text: TextScanner, output: EventSink) -> Parsing[_Head | None]:
    """Parse the header of the next message; None if there is no further message."""
    before: list[str] = []
    behind: list[str] = []
    mark = yield from text.until(_HEAD, before.append)
    if mark == "<|channel|>":
        mark = yield from text.until(_TEXT, behind.append)
    if not mark:
        output.content("".join(behind or before))
        return None
    words = "".join(behind or before).replace("<|constrain|>", " <|constrain|>")
    function = _FUNCTION.search(f"{''.join(before)} {words}")
    return _Head((words.split() or ["final"])[0], function[1] if function else "")


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
