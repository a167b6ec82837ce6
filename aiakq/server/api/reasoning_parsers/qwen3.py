"""qwen3: <think> and </think>, of Qwen3 and QwQ."""

from __future__ import annotations

from aiakq.server.api.reasoning_parsers.base import ReasoningParser


class Qwen3ReasoningParser(ReasoningParser):
    """The model writes both marks, or the prompt the first one, or both of them."""

    template_marks = ("</think>",)
