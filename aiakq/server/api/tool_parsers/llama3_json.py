"""llama3_json: {"name": ..., "parameters": {...}}, with or without <|python_tag|> before it, of Llama 3.1 and later."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from aiakq.runtime.structured.formats import (
    Format,
    any_tags,
    any_text,
    const,
    either,
    regex,
    schema,
    sequence,
    some_tags,
    tag,
    text_with_tags,
)
from aiakq.server.api.output.checked_calls import CheckedCalls
from aiakq.server.api.output.events import EventSink, NoCall
from aiakq.server.api.output.json_text import json_call
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.output.schema_check import Budget
from aiakq.server.api.tool_parsers.base import JsonToolParser, json_call_tag

_TAG = "<|python_tag|>"
_STARTS = Marks(_TAG, "{")
#: An object up to its first key.
_BEGUN = re.compile(r'[\s;,]*\{[\s,]*"(?:[^"\\]|\\.)*"\s*:', re.DOTALL)
_BETWEEN = re.compile(r"[ \t\r\n0-9A-Za-z.,:+\-]+")
_IN_STRING = re.compile(r'[^"\\]+')
#: Parts of patterns of calls.
_S = r"[ \t\r\n]*"
_FUNCTION = rf'"type"{_S}:{_S}"function"'
_KEY = rf'"name"{_S}:{_S}'
#: Text that may precede the tool's name in the object of a call without the tag.
_BEFORE_NAME = ("", '"type": "function", ')


class Llama3JsonParser(JsonToolParser):
    """Objects separated by ``; ``.

    Without the tag, an object is a call only if its first key, except for ``"type": "function"``, names a tool of the
    request, because an answer may be JSON, too. After other text, where no grammar enforces it, it is held back until
    it is complete, and its arguments have to match the schema of the tool.
    """

    marks = (_TAG,)
    template_marks = (_TAG,)
    triggers = (_TAG,)
    separator = "; "
    arguments_key = "parameters"
    starts = Marks(_TAG)

    @classmethod
    def call_tags(cls, schemas: Mapping[str, object], only_one: bool) -> list[Format]:
        key = cls.arguments_key
        return [json_call_tag(name, each, key, before) for name, each in schemas.items() for before in _BEFORE_NAME]

    @classmethod
    def answer_format(cls, schemas: Mapping[str, object], only_one: bool) -> Format:
        calls = some_tags(cls.call_tags(schemas, only_one), cls.separator, only_one=only_one)
        names = "|".join(map(_quoted, schemas))
        # Covers every form of a call, so that the parser does not take text for a call.
        call = rf'{_S}\{{[ \t\r\n,]*({_FUNCTION}[ \t\r\n,]*)*({_KEY}"({names}|[^"\\]*\\)|"[^"\\]*\\)'
        text = any_text(not_beginning=call)
        marked = text_with_tags([tag(_TAG, calls)], cls.triggers, only_one=only_one, text=text)
        return either(cls._unmarked_calls(schemas, only_one), marked)

    @classmethod
    def _unmarked_calls(cls, schemas: Mapping[str, object], only_one: bool) -> Format:
        """Return the format of calls at the beginning of a message, where any other text is allowed up to the name.

        The lexer of grammars prefers the longest match: text up to the name and a call have to be matched at once.
        """
        first: list[Format] = []
        for name, each in schemas.items():
            begin = rf'{_S}\{{{_S}({_FUNCTION}{_S},{_S})?{_KEY}"{_quoted(name)}{_S},{_S}"{cls.arguments_key}"{_S}:{_S}'
            first.append(sequence(regex(begin), schema(each), const("}")))
        calls = [tag(cls.separator, each) for each in cls.call_tags(schemas, only_one)]
        return either(*first) if only_one else sequence(either(*first), any_tags(calls))

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        spaces = yield from text.skip_spaces()
        if (yield from text.peek()) == "{":
            yield from self._read_objects(text, output, spaces, None)
        else:
            output.content(spaces)
        yield from self.parse_later(text, output)

    def parse_later(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        budget = Budget()
        while mark := (yield from text.until(_STARTS, output.content, read_mark=False)):
            if mark == _TAG:
                yield from text.match(mark)
                yield from self.read_calls(text, output, mark)
            else:
                yield from self._read_objects(text, output, "", budget)

    def parse_thought(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        """A call may begin within what looks like JSON: all but its first character is read again."""
        while mark := (yield from text.until(_STARTS, output.content, read_mark=False)):
            if mark == _TAG:
                yield from text.match(mark)
                yield from self.read_calls(text, output, mark)
                continue
            text.record()
            while (yield from text.peek()) == "{":
                if not (yield from json_call(text, output, accepts=self.tools.__contains__)):
                    written = text.recorded()
                    output.content(text.read_again(written, keep=written.index("{") + 1))
                    break
                if text.is_exhausted:
                    return
                yield from _record_separator(text)
            else:
                output.content(text.recorded())

    def _read_objects(self, text: TextScanner, output: EventSink, before: str, budget: Budget | None) -> Parsing[None]:
        """Read calls without the tag, up to an object that is none.

        before  white space before the first one, which has been read.
        budget  for the checks of calls; None to pass calls on as they are written.
        """
        text.record(before)
        while (yield from text.peek()) == "{":
            checked = None if budget is None else CheckedCalls(self.enforced, text, budget)
            try:
                is_call = yield from json_call(text, checked or output, accepts=self.tools.__contains__)
                if not is_call:
                    written = text.recorded()
                    output.content(written)
                    if _BEGUN.match(written):
                        yield from _rest_of_object(text, output)
                    return
            except NoCall:
                if checked is None:
                    raise
            if checked is not None:
                if not checked.found:
                    break
                checked.found[0](output)
            elif text.is_exhausted:
                return
            yield from _record_separator(text)
        output.content(text.recorded())


def _record_separator(text: TextScanner) -> Parsing[None]:
    """Read what separates two calls, and record from there on."""
    text.record()
    yield from text.skip_spaces()
    yield from text.match(";", ",")
    yield from text.skip_spaces()


def _quoted(name: str) -> str:
    """Return a pattern of ``name`` in JSON behind its opening quote."""
    return re.escape(json.dumps(name, ensure_ascii=False)[1:])


def _string(text: TextScanner, output: EventSink) -> Parsing[bool]:
    """Read a JSON string, which is content. Returns whether it has an end."""
    output.content(text.take())
    while True:
        output.content(text.span(_IN_STRING))
        character = yield from text.peek()
        if not character:
            return False
        if character == '"':
            output.content(text.take())
            return True
        if character == "\\":
            output.content(text.take())
            if (yield from text.peek()):
                output.content(text.take())


def _rest_of_object(text: TextScanner, output: EventSink) -> Parsing[None]:
    """Read the rest of a JSON object, which is content, up to its end or to what is no JSON."""
    depth = 1
    while depth:
        output.content(text.span(_BETWEEN))
        character = yield from text.peek()
        if character == '"':
            if not (yield from _string(text, output)):
                return
        elif character and character in "{[}]":
            depth += 1 if character in "{[" else -1
            output.content(text.take())
        elif not character or not _BETWEEN.match(character):
            return
