"""deepseek_v3: calls between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>, of DeepSeek V3 and R1.

A call is <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, its arguments in a fence of JSON, <｜tool▁call▁end｜>.
From V3.1 on it is <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>.
"""

from __future__ import annotations

from aiakq.runtime.structured.formats import Format, const, either, regex, sequence, tag
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.json_text import MAX_NAME, arguments_value
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.tool_parsers.base import SectionToolParser

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_TYPE = "function"
_BEHIND_TYPE = Marks(_SEPARATOR, _CALL_END, _CALL, _BEGIN, _END, "\n")
_BEHIND_NAME = Marks("```", "{", _CALL_END, _CALL, _BEGIN, _END)


class DeepseekV3Parser(SectionToolParser):
    """Parses both forms."""

    marks = (_BEGIN, _END, _CALL, _SEPARATOR, _CALL_END)
    template_marks = (_BEGIN,)
    section = (_BEGIN, _END)
    call = _CALL
    quotes_values = True
    triggers = (_BEGIN,)

    @classmethod
    def call_tag(cls, name: str, arguments: Format) -> Format:
        fenced = sequence(const(_TYPE), const(_SEPARATOR), const(f"{name}\n```json\n"), arguments, const("\n```"))
        plain = sequence(const(name), const(_SEPARATOR), arguments)
        return tag("", sequence(tag(_CALL, either(fenced, plain), _CALL_END), regex("\n?")))

    def read_call(self, text: TextScanner, output: EventSink) -> Parsing[bool]:
        kind: list[str] = []
        if (yield from text.until(_BEHIND_TYPE, kind.append, read_mark=False)) != _SEPARATOR:
            return False
        yield from text.match(_SEPARATOR)
        first = name = "".join(kind).strip()
        fenced = False
        if (yield from text.peek()) != "{":
            pieces: list[str] = []
            behind = yield from text.until(_BEHIND_NAME, pieces.append, read_mark=False)
            name = "".join(pieces).strip() or ("" if first == _TYPE else first)
            if first not in ("", _TYPE, name):  # the name of another function, or a text
                return False
            fenced = bool((yield from text.match("```json", "```")))
            yield from text.skip_spaces()
            if not behind:
                return False
        if not 0 < len(name) <= MAX_NAME or (yield from text.peek()) != "{":
            return False
        output.start_call(name)
        complete = yield from arguments_value(text, output.arguments)
        if complete or not text.is_exhausted:
            output.end_call()
        yield from text.skip_spaces()
        if fenced:
            yield from text.skip("```")
            yield from text.skip_spaces()
        yield from text.skip(_CALL_END)
        return True
