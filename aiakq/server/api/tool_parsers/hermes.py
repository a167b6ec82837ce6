"""hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, of Hermes 2 and 3, Qwen2.5, QwQ and Qwen3."""

from __future__ import annotations

from aiakq.server.api.output.scanner import Marks
from aiakq.server.api.tool_parsers.base import JsonToolParser


class HermesParser(JsonToolParser):
    """Each call has its own tag."""

    marks = ("<tool_call>", "</tool_call>")
    template_marks = ("<tool_call>",)
    triggers = ("<tool_call>",)
    call_begins = ("<tool_call>",)
    separator = "\n"
    starts = Marks("<tool_call>")
    ends = ("</tool_call>",)
