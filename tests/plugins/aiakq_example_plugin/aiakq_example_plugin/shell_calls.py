"""Parsers of a model that writes `!f {"a": 1}` as a call on a line of its own, and its reasoning in brackets."""

from __future__ import annotations

from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_text import arguments_value
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.reasoning_parsers.base import ReasoningParser
from aiakq.server.api.tool_parsers.base import ToolParser

_CALL = Marks("\n!")
_BEHIND_NAME = Marks(" {", "\n")


class ShellCallParser(ToolParser):
    """Calls are lines that begin with an exclamation mark, but for the first line."""

    template_marks = ("!name {",)

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        while mark := (yield from text.until(_CALL, output.content)):
            text.record(mark)
            name: list[str] = []
            if (yield from text.until(_BEHIND_NAME, name.append, read_mark=False)) != " {":
                output.content(text.recorded())
                continue
            text.recorded()
            output.start_call("".join(name))
            yield from text.skip_spaces()
            if (yield from arguments_value(text, output.arguments)) or not text.is_exhausted:
                output.end_call()


class BracketReasoningParser(ReasoningParser):
    """Reasoning in double brackets."""

    starts = ("((",)
    ends = ("))",)
