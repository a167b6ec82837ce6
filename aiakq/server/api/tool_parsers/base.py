"""ToolParser: finds the calls of tools in generated text. Its subclasses know one format each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_text import json_call
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner


class ToolParser:
    """A parser of one message. A subclass has ``marks`` and ``parse``.

    marks           the texts around calls. Those that are special tokens stay in the text for it.
    template_marks  a chat template with all of these is one of this format; empty: that cannot be told.
    tools           the JSON schemas of the arguments, by the name of the tool.

    A parser never raises: what is no call is content. It takes time and memory in proportion to the text.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    template_marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.tools = tools

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        """Read ``text`` to its end; its calls and everything else go to ``output``."""
        raise NotImplementedError

    @staticmethod
    def call_id(seed: str) -> str:
        """The id of a call that the model gave none; equal for equal seeds."""
        return "chatcmpl-tool-" + hashlib.blake2b(seed.encode(), digest_size=16).hexdigest()


class JsonToolParser(ToolParser):
    """Calls that are JSON objects with a name and arguments, behind a mark: one, an array, or several in a row.

    starts      the marks; one may end with the bracket of an array.
    ends        what may follow the calls.
    """

    starts: ClassVar[Marks]
    ends: ClassVar[tuple[str, ...]] = ()

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        while mark := (yield from text.until(self.starts, output.content)):
            yield from self.read_calls(text, output, mark)

    def read_calls(self, text: TextScanner, output: EventSink, mark: str, only_known: bool = False) -> Parsing[None]:
        """Read the calls behind ``mark``. ``only_known``: an object is one only if it names a tool of the request."""
        accepts = self.tools.__contains__ if only_known else bool
        text.record(mark)
        yield from text.skip_spaces()
        in_array = mark.endswith("[") or bool((yield from text.match("[")))
        found = False
        while True:
            yield from text.skip_spaces()
            if in_array and found and (yield from text.match("]")):
                text.record()
                break
            if found:
                yield from text.match(",", ";")
                yield from text.skip_spaces()
            if (yield from text.peek()) != "{" or not (yield from json_call(text, output, accepts=accepts)):
                break
            found = True
            text.record()
        output.content(text.recorded())
        if found and self.ends:
            text.record()
            yield from text.skip_spaces()
            end = yield from text.skip(*self.ends)
            spaces = text.recorded()
            if not end and not text.is_exhausted:
                output.content(spaces)
