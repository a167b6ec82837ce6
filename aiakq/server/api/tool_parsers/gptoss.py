"""gptoss, openai: messages to functions.NAME in the channels of gpt-oss."""

from __future__ import annotations

from aiakq.server.api.output.channels import MARKS, read_channels
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.scanner import Parsing, TextScanner
from aiakq.server.api.tool_parsers.base import ToolParser


class GptossParser(ToolParser):
    """Parses the complete message, unless reasoning is separated; then the reasoning parser does."""

    marks = MARKS
    template_marks = ("<|channel|>commentary", "to=", "functions.")

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        yield from read_channels(text, output, output.content, in_analysis=False, finds_calls=True)
