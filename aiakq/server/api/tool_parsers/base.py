"""ToolParser: parse tool calls in generated text. Each subclass implements one format."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from aiakq.runtime.structured.formats import Format, const, regex, schema, sequence, some_tags, tag, text_with_tags
from aiakq.server.api.output.argument_schemas import EnforcedSchemas
from aiakq.server.api.output.events import EventSink, NoCall
from aiakq.server.api.output.json_text import json_call
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner, marks_of


class ToolParser:
    """A parser of one message. Subclasses define ``marks`` and ``parse``.

    marks           strings around calls. Special tokens among them are kept in the text.
    template_marks  strings that identify a chat template of this format; empty if it cannot be detected.
    triggers        strings that always start a call; empty if the format has none.
    separator       text between two calls.
    quotes_values   whether the values of arguments are in quotes, so that no call can be part of one unescaped.
    tools           tool name -> JSON schema of its arguments, as the client wrote it.
    enforced        the same in the form that grammars enforce, to check calls that no grammar enforced.

    A parser never raises: text that is not a call is content. Whether the arguments of a call are valid is up to
    ``output``. Time and memory are linear in the length of the text.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    template_marks: ClassVar[tuple[str, ...]] = ()
    triggers: ClassVar[tuple[str, ...]] = ()
    separator: ClassVar[str] = ""
    quotes_values: ClassVar[bool] = False

    def __init__(self, tools: Mapping[str, Mapping[str, object]]) -> None:
        self.tools = tools
        self.enforced = EnforcedSchemas(tools)

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        """Parse ``text`` to its end, and pass calls and other text to ``output``."""
        raise NotImplementedError

    def parse_thought(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        """Like ``parse``, for the text of a thought: a call may begin anywhere."""
        return self.parse(text, output)

    def parse_later(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        """Like ``parse``, for text that does not begin the message."""
        return self.parse(text, output)

    @classmethod
    def has_grammar(cls, schemas: Mapping[str, object]) -> bool:
        """Whether ``call_tags`` supports tools with these names and argument schemas."""
        return False

    @classmethod
    def call_tags(cls, schemas: Mapping[str, object], only_one: bool) -> list[Format]:
        """Return tags of calls whose arguments match these JSON ``schemas``.

        only_one  exactly one call per tag; otherwise, in array formats, a tag has all calls.
        """
        raise NotImplementedError

    @classmethod
    def answer_format(cls, schemas: Mapping[str, object], only_one: bool) -> Format:
        """Return the format of a message of text and calls, for a parser with ``triggers``."""
        return text_with_tags(cls.call_tags(schemas, only_one), cls.triggers, only_one=only_one)

    @staticmethod
    def call_id(seed: str) -> str:
        """Return the id of a call for which the model wrote none; equal for equal seeds."""
        return "chatcmpl-tool-" + hashlib.blake2b(seed.encode(), digest_size=16).hexdigest()


def read_message(
    tools: ToolParser, text: TextScanner, output: EventSink, in_thought: bool = False, is_later: bool = False
) -> Parsing[None]:
    """Read ``text`` to its end with the parser ``tools``. What ``output`` refuses as a call is content.

    In a thought, a call may begin within one that is broken off: what was read of that one is read again.

    is_later  whether the text does not begin the message.
    """
    again = in_thought and tools.quotes_values
    while True:
        parse = tools.parse_thought if in_thought else tools.parse_later if is_later else tools.parse
        try:
            yield from parse(text, output)
            if not again or not output.has_open_call:
                break
            output.drop_call()
        except NoCall:
            pass
        part = text.part()
        output.content(text.read_again(part, keep=1) if again else part)
    yield from text.rest(output.content)
    output.end_text()


#: Maximum number of characters between the mark of a section and its first call.
_MAX_NOISE = 256
_BRACKET = Marks("[")
_BLANKS = regex(r"[ \n]{0,2}")
#: Tool names that formats without quotes support.
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


def json_call_tag(name: str, arguments: object, key: str, before: str = "") -> Format:
    """Return the tag of a call as a JSON object with name and arguments; ``arguments`` is their JSON schema.

    before  text at the start of the object, before the name.
    """
    begin = const(f'{{{before}"name": {json.dumps(name)}, "{key}": ')
    return tag("", sequence(begin, schema(arguments), const("}")))


class JsonToolParser(ToolParser):
    """Parser of JSON objects with name and arguments after a mark: a single call, an array, or several in a row.

    starts         the marks; one may end with the bracket of an array.
    ends           text that may follow the calls.
    call_begins    text that models write before a call, or, with the bracket, before an array of calls.
    arguments_key  key of the arguments.
    """

    starts: ClassVar[Marks]
    ends: ClassVar[tuple[str, ...]] = ()
    call_begins: ClassVar[tuple[str, ...]] = ()
    arguments_key: ClassVar[str] = "arguments"
    quotes_values = True

    @classmethod
    def has_grammar(cls, schemas: Mapping[str, object]) -> bool:
        return True

    @classmethod
    def call_tags(cls, schemas: Mapping[str, object], only_one: bool) -> list[Format]:
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
        """Read the calls after ``mark``.

        only_known  treat an object as a call only if it begins with the name of a tool of the request.
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
            if text.is_exhausted:
                return
            has_calls = True
            text.record()
        # Another mark may follow in what looked like JSON.
        output.content(text.read_again(text.recorded(), keep=0 if has_calls else len(mark)))
        if has_calls and self.ends:
            text.record()
            yield from text.skip_spaces()
            end = yield from text.skip(*self.ends)
            spaces = text.recorded()
            if not end and not text.is_exhausted:
                output.content(spaces)


class PlainJsonParser(JsonToolParser):
    """A bare array of calls, used for forced calls if the model's own format has no grammar."""

    call_begins = ("[",)
    arguments_key = "parameters"

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        yield from text.skip_spaces()
        if (yield from text.match("[")):
            yield from self.read_calls(text, output, "[")

    def parse_later(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        return text.rest(output.content)

    def parse_thought(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        while (yield from text.until(_BRACKET, output.content)):
            yield from self.read_calls(text, output, "[", only_known=True)


class UnquotedToolParser(ToolParser):
    """Parser of calls with an unquoted name, followed by arguments in the format ``arguments_format``."""

    @classmethod
    def has_grammar(cls, schemas: Mapping[str, Any]) -> bool:
        return all(
            PLAIN_NAME.fullmatch(name) and cls.arguments_format(each) is not None for name, each in schemas.items()
        )

    @classmethod
    def arguments_format(cls, parameters: Mapping[str, object]) -> Format | None:
        """Return the format of arguments with the JSON schema ``payload``, or None if it cannot be exact."""
        return schema(parameters)

    @classmethod
    def arguments_formats(cls, schemas: Mapping[str, Any]) -> Iterator[tuple[str, Format]]:
        """Return tool name -> format of its arguments. All must be supported."""
        for name, each in schemas.items():
            arguments = cls.arguments_format(each)
            assert arguments is not None, "has_grammar has said so"
            yield name, arguments


class SectionToolParser(UnquotedToolParser):
    """Parser of calls with their own marks inside a section. Subclasses define ``call_tag`` and ``read_call``.

    section         marks around all calls.
    other_sections  marks that models write in place of them.
    call            mark before each call.
    """

    section: ClassVar[tuple[str, str]]
    other_sections: ClassVar[tuple[tuple[str, str], ...]] = ()
    call: ClassVar[str]

    @classmethod
    def call_tags(cls, schemas: Mapping[str, object], only_one: bool) -> list[Format]:
        begin, end = cls.section
        calls = [cls.call_tag(*each) for each in cls.arguments_formats(schemas)]
        return [tag(begin, some_tags(calls, "", only_one=only_one), end)]

    @classmethod
    def call_tag(cls, name: str, arguments: Format) -> Format:
        """Return the tag of a call with its marks."""
        raise NotImplementedError

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        begins, ends = zip(self.section, *self.other_sections, strict=True)
        outside, inside = marks_of(*begins, self.call), marks_of(*begins, self.call, *ends)
        is_open = False  # whether a section had a call, and has not ended
        while mark := (yield from text.until(inside if is_open else outside, output.content)):
            if mark in ends:
                is_open = False
                continue
            text.record(mark)
            if mark in begins:
                yield from self.read_up_to_call(text)
                if not (yield from text.is_before(self.call)):
                    output.content(text.recorded())
                    continue
                before = text.recorded()
                yield from text.match(self.call)
                text.record(before + self.call)
                output.before_call(before[len(mark) :].strip())
            if not (yield from self.read_call(text, output)):
                output.content(text.recorded())
                continue
            text.recorded()
            # Only white space, which is dropped, may come between calls.
            yield from text.skip_spaces()
            is_open = not (yield from text.skip(*ends))

    def read_up_to_call(self, text: TextScanner) -> Parsing[None]:
        """Read spaces, and a short text that some models write, before the first call of a section."""
        yield from text.skip_spaces()
        for _ in range(_MAX_NOISE):
            for mark in (self.call, *itertools.chain(self.section, *self.other_sections)):
                if (yield from text.is_before(mark)):
                    return
            if not (yield from text.peek()):
                return
            text.take()

    def read_call(self, text: TextScanner, output: EventSink) -> Parsing[bool]:
        """Read a call after its first mark. Returns whether there was one."""
        raise NotImplementedError
