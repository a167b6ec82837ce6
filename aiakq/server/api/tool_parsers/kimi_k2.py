"""kimi_k2: calls between <|tool_calls_section_begin|> and <|tool_calls_section_end|>, of Kimi K2.

A call is <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>; the text before the
arguments is its id.
"""

from __future__ import annotations

from aiakq.runtime.structured.formats import Format, const, regex, sequence, tag
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_text import MAX_NAME, arguments_value
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.tool_parsers.base import SectionToolParser

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
#: Marks that the model also writes, which are no special tokens.
_OTHER_BEGIN, _OTHER_END = "<|tool_call_section_begin|>", "<|tool_call_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_BEHIND_ID = Marks(_ARGUMENTS, _CALL_END, _CALL, _BEGIN, _END)


class KimiK2Parser(SectionToolParser):
    """The model writes the ids of calls, which its chat template expects in later requests."""

    marks = (_BEGIN, _END, _OTHER_BEGIN, _OTHER_END, _CALL, _ARGUMENTS, _CALL_END)
    template_marks = (_BEGIN,)
    section = (_BEGIN, _END)
    other_sections = ((_OTHER_BEGIN, _OTHER_END),)
    call = _CALL
    quotes_values = True
    triggers = (_BEGIN,)

    @classmethod
    def call_tag(cls, name: str, arguments: Format) -> Format:
        id = sequence(const(f"functions.{name}:"), regex("[0-9]{1,3}"))
        return tag(_CALL, sequence(id, const(_ARGUMENTS), arguments), _CALL_END)

    def read_call(self, text: TextScanner, output: EventSink) -> Parsing[bool]:
        pieces: list[str] = []
        if (yield from text.until(_BEHIND_ID, pieces.append, read_mark=False)) != _ARGUMENTS:
            return False
        yield from text.match(_ARGUMENTS)
        yield from text.skip_spaces()
        id = "".join(pieces).strip()
        name = id.rpartition(":")[0] or id
        name = name.removeprefix("functions.")
        if not name or len(id) > MAX_NAME or (yield from text.peek()) != "{":
            return False
        output.start_call(name, id if ":" in id else "")
        complete = yield from arguments_value(text, output.arguments)
        if complete or not text.is_exhausted:
            output.end_call()
        yield from text.skip_spaces()
        yield from text.skip(_CALL_END)
        return True
