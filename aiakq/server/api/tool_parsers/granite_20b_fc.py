"""granite-20b-fc: <function_call>{"name": ..., "arguments": {...}}, of Granite 20B Function Calling."""

from __future__ import annotations

from aiakq.server.api.output.scanner import Marks
from aiakq.server.api.tool_parsers.base import JsonToolParser


class Granite20bFcParser(JsonToolParser):
    """Each call has a mark before it and none after it."""

    marks = ("<function_call>",)
    template_marks = ("<function_call>",)
    triggers = ("<function_call>",)
    call_begins = ("<function_call>",)
    separator = "\n"
    starts = Marks("<function_call>")
