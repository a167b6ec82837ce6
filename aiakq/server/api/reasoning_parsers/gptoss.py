"""gptoss: the channels of gpt-oss. Reasoning is in the channel analysis, the answer in the channel final.

A message is <|channel|>NAME<|message|>text, up to <|end|>, <|return|> or <|call|>; <|start|>assistant comes before the
next one. What follows a name, such as a recipient, is dropped.
"""

from __future__ import annotations

from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.reasoning_parsers.base import ReasoningParser

_HEAD = Marks("<|channel|>", "<|message|>")
_TEXT = Marks("<|message|>")
_END = Marks("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")


class GptossReasoningParser(ReasoningParser):
    """Reads the whole message: there may be reasoning between two parts of the answer."""

    starts = ("<|channel|>analysis<|message|>",)
    ends = ("<|end|>", "<|channel|>final<|message|>")
    marks = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
    has_answer_mark = False
    template_marks = ("<|channel|>analysis",)

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        channel = "analysis"
        if not self.is_open:
            spaces = yield from text.skip_spaces()
            if (yield from text.match("<|channel|>", "<|start|>")):
                channel = yield from _read_channel(text, output)
            else:  # no mark: an answer
                output.content(spaces)
                channel = "final"
        while channel:
            is_reasoning = channel == "analysis"
            mark = yield from text.until(_END, output.reasoning if is_reasoning else output.content)
            if is_reasoning and mark:
                output.end_reasoning(text.num_bytes)
            channel = (yield from _read_channel(text, output)) if mark else ""


def _read_channel(text: TextScanner, output: EventSink) -> Parsing[str]:
    """Read up to the text of the next message, and return its channel; "" if there is none."""
    head: list[str] = []
    mark = yield from text.until(_HEAD, head.append)
    if mark == "<|channel|>":
        head.clear()
        mark = yield from text.until(_TEXT, head.append)
    if not mark:
        output.content("".join(head))
        return ""
    return ("".join(head).split() or ["final"])[0]
