"""qwen3_coder: <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>, of Qwen3-Coder."""

from __future__ import annotations

from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_text import MAX_NAME
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.tool_parsers.base import ToolParser
from aiakq.server.api.tool_parsers.tagged_values import TaggedArguments

_STARTS = Marks("<tool_call>", "<function=")
_BEHIND_NAME = Marks(">", "<", "\n")
_BEHIND_VALUE = Marks("</parameter>", "<parameter=", "</function>", "</tool_call>")


class Qwen3CoderParser(ToolParser):
    """Values are text on lines of their own. Some models leave out the outer tag, or the tag that ends a value."""

    marks = ("<tool_call>", "</tool_call>")
    template_marks = ("<function=", "<parameter=")

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        while mark := (yield from text.until(_STARTS, output.content)):
            text.record(mark)
            if mark == "<tool_call>":
                yield from text.skip_spaces()
                if not (yield from text.match("<function=")):
                    output.content(text.recorded())
                    continue
            name: list[str] = []
            end = yield from text.until(_BEHIND_NAME, name.append, read_mark=False)
            called = "".join(name).strip()
            if end != ">" or not 0 < len(called) <= MAX_NAME:
                output.content(text.recorded())
                continue
            text.recorded()
            text.take()
            output.start_call(called)
            yield from self._read_parameters(text, output, TaggedArguments(self.tools.get(called, {}), output))

    def _read_parameters(self, text: TextScanner, output: EventSink, arguments: TaggedArguments) -> Parsing[None]:
        """Read what is behind the name of a call, to its end."""
        while True:
            yield from text.skip_spaces()
            if not (yield from text.skip("<parameter=")):
                break
            key: list[str] = []
            end = yield from text.until(_BEHIND_NAME, key.append, read_mark=False)
            if not end:
                return  # cut off
            if end != ">":
                arguments.end()
                output.content("<parameter=" + "".join(key))
                return
            text.take()
            value = arguments.begin("".join(key).strip(), trim_line=True)
            end = yield from text.until(_BEHIND_VALUE, value.add, read_mark=False, keep_rest=False)
            if not end:
                return  # cut off
            value.end()
            yield from text.match("</parameter>")
        if not text.is_exhausted:
            yield from text.skip("</function>")
            arguments.end()
            yield from text.skip_spaces()
            yield from text.skip("</tool_call>")
