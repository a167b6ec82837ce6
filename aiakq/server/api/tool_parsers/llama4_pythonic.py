"""llama4_pythonic: <|python_start|>[f(a=1), g(b="x")]<|python_end|>, of Llama 4."""

from __future__ import annotations

from aiakq.server.api.tool_parsers.pythonic import PythonicParser


class Llama4PythonicParser(PythonicParser):
    """The list of calls is between marks, or without marks at the beginning of the message."""

    marks = ("<|python_start|>", "<|python_end|>")
    template_marks = ("<|python_start|>",)
    starts = triggers = ("<|python_start|>",)
    ends = ("<|python_end|>",)
