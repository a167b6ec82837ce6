"""glm45: <think> and </think>, of GLM-4.5 and later."""

from __future__ import annotations

from aiakq.server.api.reasoning_parsers.base import ReasoningParser


class Glm45ReasoningParser(ReasoningParser):
    """The same marks as Qwen3."""

    template_marks = ("</think>", "[gMASK]")
