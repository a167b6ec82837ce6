"""phi4_mini_json: functools[{"name": ..., "arguments": {...}}], of Phi-4-mini."""

from __future__ import annotations

from aiakq.server.api.output.scanner import Marks
from aiakq.server.api.tool_parsers.base import JsonToolParser


class Phi4MiniJsonParser(JsonToolParser):
    """All calls are in one array. The mark includes the bracket, because functools is also a Python module."""

    marks = ("functools[",)
    template_marks = ("functools",)
    triggers = ("functools[",)
    call_begins = ("functools[",)
    starts = Marks("functools[")
