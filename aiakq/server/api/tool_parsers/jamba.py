"""jamba: <tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>, of Jamba 1.5."""

from __future__ import annotations

from aiakq.server.api.output.scanner import Marks
from aiakq.server.api.tool_parsers.base import JsonToolParser


class JambaParser(JsonToolParser):
    """All calls are in one array."""

    marks = ("<tool_calls>", "</tool_calls>")
    template_marks = ("<tool_calls>",)
    triggers = ("<tool_calls>",)
    call_begins = ("<tool_calls>[",)
    starts = Marks("<tool_calls>")
    ends = ("</tool_calls>",)
