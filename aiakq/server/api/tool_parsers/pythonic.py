"""pythonic: [f(a=1), g(b="x")], of Llama 3.2 and ToolACE."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import ClassVar

from aiakq.runtime.structured.formats import (
    Format,
    any_tags,
    any_text,
    const,
    either,
    regex,
    sequence,
    some_tags,
    tag,
    text_with_tags,
)
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_text import MAX_NAME
from aiakq.server.api.output.scanner import Parsing, TextScanner, marks_of
from aiakq.server.api.tool_parsers.argument_formats import keyword_arguments
from aiakq.server.api.tool_parsers.base import UnquotedToolParser
from aiakq.server.api.tool_parsers.python_values import python_literal, python_value

_NAME = re.compile(r"[\w.\-]+")
#: The beginning of a list.
_LIST = r"[ \t\r\n]*\[[ \t\r\n]*"


class PythonicParser(UnquotedToolParser):
    """A Python list of calls, whose arguments are literals.

    The list is at the beginning of the message or after a mark. Without a mark, its first call must name a tool of the
    request, because an answer may begin with a bracket, too.

    starts, ends  marks around the list.
    """

    starts: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    ends: ClassVar[tuple[str, ...]] = ()
    marks: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    template_marks: ClassVar[tuple[str, ...]] = ("[func_name1(",)
    triggers: ClassVar[tuple[str, ...]] = starts
    quotes_values = True

    @classmethod
    def arguments_format(cls, parameters: Mapping[str, object]) -> Format | None:
        return keyword_arguments(parameters)

    @classmethod
    def call_tags(cls, schemas: Mapping[str, object], only_one: bool) -> list[Format]:
        calls = [tag(f"{name}(", arguments, ")") for name, arguments in cls.arguments_formats(schemas)]
        return [tag("[", some_tags(calls, ", ", only_one=only_one), "]")]

    @classmethod
    def answer_format(cls, schemas: Mapping[str, object], only_one: bool) -> Format:
        [calls] = cls.call_tags(schemas, only_one)
        names = "|".join(map(re.escape, schemas))
        text = any_text(not_beginning=rf"{_LIST}({names})\(")
        marked = [tag(start, calls, "".join(cls.ends)) for start in cls.starts]
        rest = text_with_tags(marked, cls.starts, only_one=only_one, text=text)
        return either(cls._unmarked_calls(schemas, only_one), rest)

    @classmethod
    def _unmarked_calls(cls, schemas: Mapping[str, object], only_one: bool) -> Format:
        """Return the format of a list at the beginning of a message, where any other text is allowed up to its name.

        The lexer of grammars prefers the longest match: text up to the name and a call have to be matched at once.
        """
        arguments = list(cls.arguments_formats(schemas))
        more = [tag(f", {name}(", each, ")") for name, each in arguments]
        end = [const(")]")] if only_one else [const(")"), any_tags(more), const("]")]
        return either(*(sequence(regex(rf"{_LIST}{re.escape(name)}\("), each, *end) for name, each in arguments))

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        text.record()
        yield from text.skip_spaces()
        mark = yield from text.match(*self.starts)
        if (yield from text.peek()) == "[":
            yield from self._read_list(text, output, only_known=not mark)
        else:
            output.content(text.recorded())
        yield from self.parse_later(text, output)

    def parse_later(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        marks = marks_of(*self.starts)
        while mark := (yield from text.until(marks, output.content)):
            yield from self._read_marked(mark, text, output)

    def parse_thought(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        marks = marks_of("[", *self.starts)
        while mark := (yield from text.until(marks, output.content, read_mark=False)):
            if mark == "[":
                text.record()
                yield from self._read_list(text, output, only_known=True)
            else:
                yield from text.match(mark)
                yield from self._read_marked(mark, text, output)

    def _read_marked(self, mark: str, text: TextScanner, output: EventSink) -> Parsing[None]:
        """Read the list after ``mark``."""
        text.record(mark)
        yield from text.skip_spaces()
        yield from self._read_list(text, output, only_known=False)

    def _read_list(self, text: TextScanner, output: EventSink, only_known: bool) -> Parsing[None]:
        """Read the calls of a list. Text that is not a call is content, including what was recorded before."""
        has_calls = False
        in_list = bool((yield from text.match("[")))
        while True:
            yield from text.skip_spaces()
            if has_calls:
                if in_list and (yield from text.match("]")):
                    text.record()
                    break
                yield from text.match(",")
                yield from text.skip_spaces()
            name = yield from _name(text)
            if (
                not name
                or (only_known and not has_calls and name not in self.tools)
                or not (yield from text.match("("))
            ):
                break
            output.start_call(name)
            has_calls = True
            if not (yield from _arguments(text, output)):
                if text.is_exhausted:
                    return
                text.record()
                break
            text.record()
        output.content(text.recorded())
        if has_calls and self.ends:
            yield from text.skip_spaces()
            yield from text.skip(*self.ends)


def _name(text: TextScanner) -> Parsing[str]:
    """Read a name, which may contain dots; "" if there is none."""
    pieces: list[str] = []
    while _NAME.match((yield from text.peek())):
        pieces.append(text.span(_NAME))
        if sum(map(len, pieces)) > MAX_NAME:
            return ""
    return "".join(pieces)


def _arguments(text: TextScanner, output: EventSink) -> Parsing[bool]:
    """Read the arguments of a call up to its closing bracket. Returns whether they are well-formed."""
    first = True
    while True:
        yield from text.skip_spaces()
        if (yield from text.match(")")):
            output.arguments("" if first else "}")
            output.end_call()
            return True
        if not first and not (yield from text.match(",")):
            break
        yield from text.skip_spaces()
        if (yield from text.peek()) == ")":  # after a trailing comma
            continue
        name = yield from _name(text)
        yield from text.skip_spaces()
        if not name or not (yield from text.match("=")):
            break
        pieces: list[str] = []
        complete = yield from python_literal(text, pieces.append)
        if not complete and text.is_exhausted:
            break
        written = "".join(pieces).strip()
        if not written:
            break
        value = python_value(written)
        value = json.dumps(written, ensure_ascii=False) if value is None else value
        output.arguments(("{" if first else ", ") + f"{json.dumps(name, ensure_ascii=False)}: {value}")
        first = False
    if not text.is_exhausted:
        output.arguments("" if first else "}")
        output.end_call(is_complete=False)
    return False
