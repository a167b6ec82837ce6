"""ToolParser: finds the calls of tools in generated text. Its subclasses know one format each."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from aiakq.runtime.structured.formats import Format, const, regex, schema, sequence, some_tags, tag, text_with_tags
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_text import json_call
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner


class ToolParser:
    """A parser of one message. A subclass has ``marks`` and ``parse``.

    marks           the texts around calls. Those that are special tokens stay in the text for it.
    template_marks  a chat template with all of these is one of this format; empty: that cannot be told.
    triggers        a text with one of these in it has a call there; empty: that is not so in this format.
    separator       what models write between two calls.
    tools           the JSON schemas of the arguments, by the name of the tool.

    A parser never raises: what is no call is content. It takes time and memory in proportion to the text.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    template_marks: ClassVar[tuple[str, ...]] = ()
    triggers: ClassVar[tuple[str, ...]] = ()
    separator: ClassVar[str] = ""

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        self.tools = tools

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        """Read ``text`` to its end; its calls and everything else go to ``output``."""
        raise NotImplementedError

    @classmethod
    def has_grammar(cls, schemas: Mapping[str, Any]) -> bool:
        """Whether ``call_tags`` knows what calls look like of tools with these names and JSON schemas of arguments."""
        return False

    @classmethod
    def call_tags(cls, schemas: Mapping[str, Any], only_one: bool) -> list[Format]:
        """Tags with calls of tools, whose arguments have these JSON ``schemas``.

        only_one  a tag has one call; else it has all calls where the format is an array.
        """
        raise NotImplementedError

    @classmethod
    def answer_format(cls, schemas: Mapping[str, Any], only_one: bool) -> Format:
        """A message of text and calls, for a format with ``triggers``."""
        return text_with_tags(cls.call_tags(schemas, only_one), cls.triggers, only_one=only_one)

    @staticmethod
    def call_id(seed: str) -> str:
        """The id of a call that the model gave none; equal for equal seeds."""
        return "chatcmpl-tool-" + hashlib.blake2b(seed.encode(), digest_size=16).hexdigest()


_BLANKS = regex(r"[ \n]{0,2}")
#: Names that formats which do not quote them can write.
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


def json_call_tag(name: str, arguments: Any, key: str, before: str = "") -> Format:
    """A JSON object with the name and the arguments of a call; ``arguments`` is their JSON schema.

    before  in the object.
    """
    begin = const(f'{{{before}"name": {json.dumps(name)}, "{key}": ')
    return tag("", sequence(begin, schema(arguments), const("}")))


class JsonToolParser(ToolParser):
    """Calls that are JSON objects with a name and arguments, behind a mark: one, an array, or several in a row.

    starts         the marks; one may end with the bracket of an array.
    ends           what may follow the calls.
    call_begins    what models write before a call, or before all of them and with the bracket of an array.
    arguments_key  what they call the arguments.
    """

    starts: ClassVar[Marks]
    ends: ClassVar[tuple[str, ...]] = ()
    call_begins: ClassVar[tuple[str, ...]] = ()
    arguments_key: ClassVar[str] = "arguments"

    @classmethod
    def has_grammar(cls, schemas: Mapping[str, Any]) -> bool:
        return True

    @classmethod
    def call_tags(cls, schemas: Mapping[str, Any], only_one: bool) -> list[Format]:
        calls = [json_call_tag(name, each, cls.arguments_key) for name, each in schemas.items()]
        end = cls.ends[0] if cls.ends else ""
        tags: list[Format] = []
        for begin in cls.call_begins:
            if begin.endswith("["):
                content = sequence(_BLANKS, some_tags(calls, ", ", only_one=only_one), _BLANKS)
                tags.append(tag(begin, content, f"]{end}"))
            else:
                tags += [tag(begin, sequence(_BLANKS, each, _BLANKS), end) if begin else each for each in calls]
        return tags

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        while mark := (yield from text.until(self.starts, output.content)):
            yield from self.read_calls(text, output, mark)

    def read_calls(self, text: TextScanner, output: EventSink, mark: str, only_known: bool = False) -> Parsing[None]:
        """Read the calls behind ``mark``.

        only_known  an object is a call only if it begins with the name of a tool of the request.
        """
        accepts = self.tools.__contains__ if only_known else None
        text.record(mark)
        yield from text.skip_spaces()
        in_array = mark.endswith("[") or bool((yield from text.match("[")))
        has_calls = False
        while True:
            yield from text.skip_spaces()
            if in_array and has_calls and (yield from text.match("]")):
                text.record()
                break
            if has_calls:
                yield from text.match(",", ";")
                yield from text.skip_spaces()
            if (yield from text.peek()) != "{" or not (yield from json_call(text, output, accepts=accepts)):
                break
            has_calls = True
            text.record()
        output.content(text.recorded())
        if has_calls and self.ends:
            text.record()
            yield from text.skip_spaces()
            end = yield from text.skip(*self.ends)
            spaces = text.recorded()
            if not end and not text.is_exhausted:
                output.content(spaces)


class PlainJsonParser(JsonToolParser):
    """An array of calls and nothing else: the form of forced calls where no grammar is known for the model's own."""

    call_begins = ("[",)
    arguments_key = "parameters"

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        yield from text.skip_spaces()
        if (yield from text.match("[")):
            yield from self.read_calls(text, output, "[")


class UnquotedToolParser(ToolParser):
    """Calls whose names stand without quotes, behind which comes what ``arguments_format`` says."""

    @classmethod
    def has_grammar(cls, schemas: Mapping[str, Any]) -> bool:
        return all(
            PLAIN_NAME.fullmatch(name) and cls.arguments_format(each) is not None for name, each in schemas.items()
        )

    @classmethod
    def arguments_format(cls, parameters: Mapping[str, Any]) -> Format | None:
        """The arguments of a call, which have the JSON schema ``payload``; None: they cannot be written exactly."""
        return schema(parameters)

    @classmethod
    def arguments_formats(cls, schemas: Mapping[str, Any]) -> Iterator[tuple[str, Format]]:
        """Each tool's name and the arguments of its calls. There is a grammar for them."""
        for name, each in schemas.items():
            arguments = cls.arguments_format(each)
            assert arguments is not None, "has_grammar has said so"
            yield name, arguments


class SectionToolParser(UnquotedToolParser):
    """Calls in a section, each with marks of its own. A subclass has ``call_tag`` and ``read_call``.

    section  the marks around all calls.
    call     the mark in front of each.
    """

    section: ClassVar[tuple[str, str]]
    call: ClassVar[str]

    @classmethod
    def call_tags(cls, schemas: Mapping[str, Any], only_one: bool) -> list[Format]:
        begin, end = cls.section
        calls = [cls.call_tag(*each) for each in cls.arguments_formats(schemas)]
        return [tag(begin, some_tags(calls, "", only_one=only_one), end)]

    @classmethod
    def call_tag(cls, name: str, arguments: Format) -> Format:
        """A call with its marks."""
        raise NotImplementedError

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        begin, end = self.section
        starts = Marks(begin, self.call)
        while mark := (yield from text.until(starts, output.content)):
            text.record(mark)
            if mark == begin:
                yield from text.skip_spaces()
                if not (yield from text.match(self.call)):
                    output.content(text.recorded())
                    continue
            if not (yield from self.read_call(text, output)):
                output.content(text.recorded())
                continue
            text.recorded()
            # Behind a call comes another one or the end; white space between is dropped.
            yield from text.skip_spaces()
            yield from text.skip(end)

    def read_call(self, text: TextScanner, output: EventSink) -> Parsing[bool]:
        """Read a call behind its first mark. Returns whether there was one."""
        raise NotImplementedError
