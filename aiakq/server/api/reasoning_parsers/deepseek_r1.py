"""deepseek_r1: <think> and </think> of DeepSeek R1, which omits the start mark."""

from __future__ import annotations

from aiakq.server.api.reasoning_parsers.base import ReasoningParser


class DeepseekR1ReasoningParser(ReasoningParser):
    """Reasoning is open from the beginning."""

    open_default = True
    template_marks = ("</think>", "<｜Assistant｜>")
