"""llama3_json: {"name": ..., "parameters": {...}}, with or without <|python_tag|> before it, of Llama 3.1 and later."""

from __future__ import annotations

from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.tool_parsers.base import JsonToolParser


class Llama3JsonParser(JsonToolParser):
    """Objects, ``; `` between them.

    Without the tag they are calls only at the beginning of the message, and only if they name a tool of the request:
    an answer may be JSON, too.
    """

    marks = ("<|python_tag|>",)
    template_marks = ("<|python_tag|>",)
    call_begins = ("",)
    separator = "; "
    arguments_key = "parameters"
    starts = Marks("<|python_tag|>")

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        spaces = yield from text.skip_spaces()
        if (yield from text.peek()) == "{":
            yield from self.read_calls(text, output, spaces, only_known=True)
        else:
            output.content(spaces)
        yield from super().parse(text, output)
