"""ReasoningParser: separate the reasoning before an answer, which is between two marks."""

from __future__ import annotations

from typing import ClassVar

from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.tool_parsers.base import ToolParser


class ReasoningParser:
    """A parser of one message. Most subclasses only define marks.

    starts, ends    marks around the reasoning. Special tokens among them are kept in the text.
    marks           additional marks that are special tokens.
    has_answer_mark  whether one of ``ends`` starts the answer.
    open_default    whether the message begins with reasoning if the prompt does not show it.
    template_marks  strings that identify a chat template of this format; empty if it cannot be detected.
    is_open         whether this message begins with reasoning, whose start mark is in the prompt.
    tools           parser of its tool calls, or None.
    """

    tools: ToolParser | None = None

    starts: ClassVar[tuple[str, ...]] = ("<think>",)
    ends: ClassVar[tuple[str, ...]] = ("</think>",)
    marks: ClassVar[tuple[str, ...]] = ()
    has_answer_mark: ClassVar[bool] = True
    open_default: ClassVar[bool] = False
    template_marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, is_open: bool) -> None:
        self.is_open = is_open

    @classmethod
    def opened_by(cls, prompt: str, continued: str | None = None) -> bool:
        """Whether ``prompt`` ends within reasoning, so that the message begins with it.

        continued  text of the message that the model continues, if any.
        """
        if continued is not None:
            last_start = max((continued.rfind(mark) for mark in cls.starts), default=-1)
            last_end = max((continued.rfind(mark) for mark in cls.ends), default=-1)
            if continued.strip():
                return last_start > last_end
        end = prompt.rstrip()
        return end.endswith(cls.starts) or (cls.open_default and not end.endswith(cls.ends))

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        """Read ``text`` up to the start of the answer, and pass reasoning to ``output``."""
        spaces = yield from text.skip_spaces()
        mark = yield from text.match(*self.starts)
        if not mark and not self.is_open:
            output.content(spaces)
            return
        if (yield from text.until(Marks(*self.ends), output.reasoning)):
            output.end_reasoning(text.num_bytes)
