"""mistral: [THINK] and [/THINK], of Magistral."""

from __future__ import annotations

from aiakq.server.api.reasoning_parsers.base import ReasoningParser


class MistralReasoningParser(ReasoningParser):
    """The marks are special tokens."""

    starts = ("[THINK]",)
    ends = ("[/THINK]",)
    template_marks = ("[THINK]",)
