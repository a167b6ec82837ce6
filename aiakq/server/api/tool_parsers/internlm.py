"""internlm: <|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>, of InternLM 2.5."""

from __future__ import annotations

from aiakq.server.api.output.scanner import Marks
from aiakq.server.api.tool_parsers.base import JsonToolParser


class InternlmParser(JsonToolParser):
    """Each call is an action."""

    marks = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>", "<|action_end|>")
    template_marks = ("<|action_start|>",)
    triggers = ("<|action_start|>",)
    call_begins = ("<|action_start|><|plugin|>",)
    separator = "\n"
    arguments_key = "parameters"
    starts = Marks("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    ends = ("<|action_end|>",)
