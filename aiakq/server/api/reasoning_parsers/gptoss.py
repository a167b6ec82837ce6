"""gptoss: the channels of gpt-oss. Reasoning is in the channel analysis, the answer in the channel final."""

from __future__ import annotations

from aiakq.runtime.protocol.thought_budget import ThoughtMarks
from aiakq.server.api.output.channels import ENDS, MARKS, read_channels
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.scanner import Parsing, TextScanner
from aiakq.server.api.reasoning_parsers.base import ReasoningParser
from aiakq.server.api.tool_parsers.gptoss import GptossParser


class GptossReasoningParser(ReasoningParser):
    """Parses the complete message, because reasoning may come between parts of the answer and between calls."""

    starts = ("<|channel|>analysis<|message|>",)
    ends = ("<|end|>", "<|channel|>final<|message|>")
    marks = MARKS
    has_answer_mark = False
    template_marks = ("<|channel|>analysis",)

    @classmethod
    def thought_marks(cls) -> ThoughtMarks:
        return ThoughtMarks(cls.starts, ENDS, "<|end|>", anywhere=True)

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        finds_calls = isinstance(self.tools, GptossParser)
        yield from read_channels(text, output, output.reasoning, in_analysis=self.is_open, finds_calls=finds_calls)
