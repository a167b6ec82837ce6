"""qwen3: <think> and </think>, of Qwen3 and QwQ."""

from __future__ import annotations

from aiakq.server.api.reasoning_parsers.base import ReasoningParser


class Qwen3ReasoningParser(ReasoningParser):
    """The prompt may contain the start mark, or both; otherwise the model writes them."""

    template_marks = ("</think>",)
