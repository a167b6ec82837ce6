"""qwen3_coder: <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>, of Qwen3-Coder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from aiakq.runtime.structured.formats import Format, sequence, tag, text_with_tags
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_text import MAX_NAME
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.tool_parsers.argument_formats import tagged_arguments
from aiakq.server.api.tool_parsers.base import UnquotedToolParser
from aiakq.server.api.tool_parsers.tagged_values import TaggedArguments

_STARTS = Marks("<tool_call>", "<function=")
_BEHIND_NAME = Marks(">", "<", "\n")
_BEHIND_VALUE = Marks("</parameter>", "<parameter=", "</function>", "</tool_call>")


_END = "</function>\n</tool_call>"


class Qwen3CoderParser(UnquotedToolParser):
    """Values are text on separate lines. Some models omit the outer tag, or the tag that ends a value."""

    marks = ("<tool_call>", "</tool_call>")
    template_marks = ("<function=", "<parameter=")
    triggers = ("<tool_call>", "<function=")
    separator = "\n"

    @classmethod
    def arguments_format(cls, parameters: Mapping[str, object]) -> Format | None:
        return tagged_arguments(parameters, _BEHIND_VALUE.texts, _parameter)

    @classmethod
    def call_tags(cls, schemas: Mapping[str, object], only_one: bool) -> list[Format]:
        return cls._tags(schemas, "<tool_call>\n")

    @classmethod
    def answer_format(cls, schemas: Mapping[str, object], only_one: bool) -> Format:
        tags = cls.call_tags(schemas, only_one) + cls._tags(schemas, "")
        return text_with_tags(tags, cls.triggers, only_one=only_one)

    @classmethod
    def _tags(cls, schemas: Mapping[str, object], begin: str) -> list[Format]:
        calls = cls.arguments_formats(schemas)
        return [tag(f"{begin}<function={name}>\n", arguments, _END) for name, arguments in calls]

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
            enforced = partial(self.enforced.__getitem__, called)
            arguments = TaggedArguments(self.tools.get(called, {}), output, enforced)
            yield from self._read_parameters(text, output, arguments)

    def _read_parameters(self, text: TextScanner, output: EventSink, arguments: TaggedArguments) -> Parsing[None]:
        """Read the parameters after the name of a call, up to its end."""
        while True:
            yield from text.skip_spaces()
            if not (yield from text.skip("<parameter=")):
                break
            key: list[str] = []
            end = yield from text.until(_BEHIND_NAME, key.append, read_mark=False)
            if not end:
                return  # cut off
            if end != ">":
                arguments.end(is_complete=False)
                output.content("<parameter=" + "".join(key))
                return
            text.take()
            value = arguments.begin("".join(key).strip(), trim_line=True)
            end = yield from value.read(text, _BEHIND_VALUE)
            if not end:
                return  # cut off
            value.end()
            yield from text.match("</parameter>")
        if not text.is_exhausted:
            is_complete = bool((yield from text.skip("</function>")))
            end = "" if is_complete else (yield from text.skip("</tool_call>"))
            arguments.end(is_complete or bool(end))
            yield from text.skip_spaces()
            if not end:
                yield from text.skip("</tool_call>")


def _parameter(name: Format, value: Format) -> Format:
    return tag("<parameter=", sequence(name, tag(">\n", value, "\n</parameter>\n")))
