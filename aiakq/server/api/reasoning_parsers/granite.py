"""granite: fixed sentences around the reasoning, of Granite 3.2."""

from __future__ import annotations

from aiakq.server.api.reasoning_parsers.base import ReasoningParser


class GraniteReasoningParser(ReasoningParser):
    """The marks are plain text."""

    starts = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")
    template_marks = ("Here is my thought process:",)
