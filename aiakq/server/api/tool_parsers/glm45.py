"""glm45, glm47: <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>, of GLM-4.5 and later."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from aiakq.runtime.structured.formats import Format, const, regex, sequence, tag
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_text import MAX_NAME
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.tool_parsers.argument_formats import tagged_arguments
from aiakq.server.api.tool_parsers.base import UnquotedToolParser
from aiakq.server.api.tool_parsers.tagged_values import TaggedArguments

_STARTS = Marks("<tool_call>")
_BEHIND_NAME = Marks("<arg_key>", "</tool_call>", "<tool_call>")
_BEHIND_KEY = Marks("</arg_key>", "</tool_call>", "<tool_call>")
_BEHIND_VALUE = Marks("</arg_value>", "</tool_call>")


#: GLM-4.5 writes a line per tag; later models do not.
_LINE = regex("\n?")


class Glm45Parser(UnquotedToolParser):
    """Values are text. Line breaks between tags are ignored."""

    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    template_marks = ("<arg_key>",)
    triggers = ("<tool_call>",)
    separator = "\n"

    @classmethod
    def arguments_format(cls, parameters: Mapping[str, object]) -> Format | None:
        return tagged_arguments(parameters, _BEHIND_VALUE.texts, _parameter)

    @classmethod
    def call_tags(cls, schemas: Mapping[str, object], only_one: bool) -> list[Format]:
        return [
            tag("<tool_call>", sequence(const(name), _LINE, arguments), "</tool_call>")
            for name, arguments in cls.arguments_formats(schemas)
        ]

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        while mark := (yield from text.until(_STARTS, output.content)):
            text.record(mark)
            name: list[str] = []
            end = yield from text.until(_BEHIND_NAME, name.append, read_mark=False)
            called = "".join(name).strip()
            if end in ("", "<tool_call>") or not 0 < len(called) <= MAX_NAME or "\n" in called:
                output.content(text.recorded())
                continue
            text.recorded()
            output.start_call(called)
            enforced = partial(self.enforced.__getitem__, called)
            arguments = TaggedArguments(self.tools.get(called, {}), output, enforced)
            yield from self._read_arguments(text, output, arguments)

    def _read_arguments(self, text: TextScanner, output: EventSink, arguments: TaggedArguments) -> Parsing[None]:
        """Read the arguments after the name of a call, up to its end."""
        is_complete = False
        while True:
            yield from text.skip_spaces()
            if not (yield from text.skip("<arg_key>")):
                is_complete = True
                break
            key: list[str] = []
            if (yield from text.until(_BEHIND_KEY, key.append, read_mark=False)) != "</arg_key>":
                break
            yield from text.match("</arg_key>")
            yield from text.skip_spaces()
            if not (yield from text.skip("<arg_value>")):
                break
            value = arguments.begin("".join(key).strip(), trim_line=False)
            end = yield from value.read(text, _BEHIND_VALUE)
            if not end:
                return  # truncated
            value.end()
            yield from text.match("</arg_value>")
        if not text.is_exhausted:
            end = yield from text.skip("</tool_call>")
            arguments.end(is_complete and bool(end))


def _parameter(name: Format, value: Format) -> Format:
    return sequence(tag("<arg_key>", name, "</arg_key>"), _LINE, tag("<arg_value>", value, "</arg_value>"), _LINE)
