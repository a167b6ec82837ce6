"""llama3_json: {"name": ..., "parameters": {...}}, with or without <|python_tag|> before it, of Llama 3.1 and later."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from aiakq.runtime.structured.formats import Format, any_text, either, some_tags, tag, text_with_tags
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.tool_parsers.base import JsonToolParser, json_call_tag

_TAG = "<|python_tag|>"
#: Text that may precede the tool's name in the object of a call without the tag.
_BEFORE_NAME = ("", '"type": "function", ')


class Llama3JsonParser(JsonToolParser):
    """Objects separated by ``; ``.

    Without the tag, an object is a call only at the beginning of the message, and only if its first key, except for
    ``"type": "function"``, names a tool of the request, because an answer may be JSON, too.
    """

    marks = (_TAG,)
    template_marks = (_TAG,)
    triggers = (_TAG,)
    separator = "; "
    arguments_key = "parameters"
    starts = Marks(_TAG)

    @classmethod
    def call_tags(cls, schemas: Mapping[str, Any], only_one: bool) -> list[Format]:
        key = cls.arguments_key
        return [json_call_tag(name, each, key, before) for name, each in schemas.items() for before in _BEFORE_NAME]

    @classmethod
    def answer_format(cls, schemas: Mapping[str, Any], only_one: bool) -> Format:
        calls = some_tags(cls.call_tags(schemas, only_one), cls.separator, only_one=only_one)
        names = "|".join(re.escape(json.dumps(name, ensure_ascii=False)[1:]) for name in schemas)
        # Covers every form of a call, so that the parser does not take text for a call.
        function, name = r'"type"\s*:\s*"function"[\s,]*', r'"name"\s*:\s*'
        call = rf'\s*\{{[\s,]*({function})*({name}"({names}|[^"\\]*\\)|"[^"\\]*\\)'
        text = any_text(not_beginning=call)
        return either(calls, text_with_tags([tag(_TAG, calls)], cls.triggers, only_one=only_one, text=text))

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        spaces = yield from text.skip_spaces()
        if (yield from text.peek()) == "{":
            yield from self.read_calls(text, output, spaces, only_known=True)
        else:
            output.content(spaces)
        yield from super().parse(text, output)
