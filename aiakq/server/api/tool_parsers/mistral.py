"""mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}], or from version 11 on [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Mapping

from aiakq.runtime.structured.formats import Format, const, schema, sequence, tag
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_text import MAX_NAME, arguments_value
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.tool_parsers.base import PLAIN_NAME, JsonToolParser

_ALPHABET = string.ascii_letters + string.digits
_BEHIND_NAME = Marks("[", "{", "\n")
_MARK = "[TOOL_CALLS]"


class MistralParser(JsonToolParser):
    """Parses both forms. Ids are 9 letters and digits, as the chat templates require."""

    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    template_marks = ("[TOOL_CALLS]",)
    triggers = ("[TOOL_CALLS]",)
    call_begins = ("[TOOL_CALLS][",)
    starts = Marks("[TOOL_CALLS]")

    @classmethod
    def call_tags(cls, schemas: Mapping[str, object], only_one: bool) -> list[Format]:
        """Allow both forms; the model prefers the one it has been trained on."""
        named = [
            tag("[TOOL_CALLS]", sequence(const(name), const("[ARGS]"), schema(each)))
            for name, each in schemas.items()
            if PLAIN_NAME.fullmatch(name)
        ]
        return [*super().call_tags(schemas, only_one), *named]

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        while (yield from text.until(self.starts, output.content)):
            text.record(_MARK)
            yield from text.skip_spaces()
            while (yield from text.match(_MARK)):  # some models repeat it
                yield from text.skip_spaces()
            written = text.recorded()
            if (yield from text.peek()) in ("[", "{"):
                yield from self.read_calls(text, output, written)
            else:
                yield from self._read_named(text, output, written)

    def _read_named(self, text: TextScanner, output: EventSink, mark: str) -> Parsing[None]:
        """Read a call whose name precedes its arguments. Text that is not a call is content, up to the next mark."""
        text.record(mark)
        pieces: list[str] = []
        yield from text.until(_BEHIND_NAME, pieces.append, read_mark=False)
        called, id = "".join(pieces).strip(), ""
        if (yield from text.is_before(_MARK)):
            output.content(text.recorded())
            return
        behind = yield from text.match("[ARGS]", "[CALL_ID]")
        if behind == "[CALL_ID]":
            pieces.clear()
            yield from text.until(_BEHIND_NAME, pieces.append, read_mark=False)
            id = "".join(pieces).strip()[:MAX_NAME]
            yield from text.match("[ARGS]")
        elif not behind and (yield from text.peek()) == "[":  # text before a list
            yield from self.read_calls(text, output, text.recorded())
            return
        yield from text.skip_spaces()
        is_name = called in self.tools or not re.search(r"\s", called)
        if not is_name or not 0 < len(called) <= MAX_NAME or (yield from text.peek()) != "{":
            output.content(text.recorded())
            return
        text.recorded()
        output.start_call(called, id)
        complete = yield from arguments_value(text, output.arguments)
        if complete or not text.is_exhausted:
            output.end_call()

    @staticmethod
    def call_id(seed: str) -> str:
        number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=16).digest())
        letters = []
        for _ in range(9):
            number, digit = divmod(number, len(_ALPHABET))
            letters.append(_ALPHABET[digit])
        return "".join(letters)
