"""granite: <|tool_call|> or <tool_call>, then [{"name": ..., "arguments": {...}}] without an end, of Granite 3."""

from __future__ import annotations

from aiakq.server.api.output.scanner import Marks
from aiakq.server.api.tool_parsers.base import JsonToolParser


class GraniteParser(JsonToolParser):
    """All calls are in one array. The first mark is that of Granite 3.0, the second that of 3.1."""

    marks = ("<|tool_call|>", "<tool_call>")
    template_marks = ("<|tool_call|>",)
    triggers = ("<|tool_call|>", "<tool_call>")
    call_begins = ("<|tool_call|>[", "<tool_call>[")
    starts = Marks("<|tool_call|>", "<tool_call>")
