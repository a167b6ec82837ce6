"""ReasoningParser: finds the reasoning in front of an answer, between two marks."""

from __future__ import annotations

from typing import ClassVar

from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.tool_parsers.base import ToolParser


class ReasoningParser:
    """A parser of one message. Most subclasses have marks only.

    starts, ends    the marks around the reasoning. Those that are special tokens stay in the text.
    marks           further ones that are special tokens.
    has_answer_mark  whether the answer begins behind one of ``ends``.
    open_default    whether the message begins with reasoning if the prompt does not say.
    template_marks  a chat template with all of these is one of this format; empty: that cannot be told.
    is_open         whether this message begins with reasoning, without its first mark.
    tools           the parser of its calls; None: they are not looked for.
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
        """Whether the reasoning is open at the end of ``prompt``, of which the end decides, not its arguments.

        continued  the text of the message that the model continues, if there is one.
        """
        if continued is not None:
            last_start = max((continued.rfind(mark) for mark in cls.starts), default=-1)
            last_end = max((continued.rfind(mark) for mark in cls.ends), default=-1)
            if continued.strip():
                return last_start > last_end
        end = prompt.rstrip()
        return end.endswith(cls.starts) or (cls.open_default and not end.endswith(cls.ends))

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        """Read ``text`` up to where the answer begins. Reasoning goes to ``output``."""
        spaces = yield from text.skip_spaces()
        mark = yield from text.match(*self.starts)
        if not mark and not self.is_open:
            output.content(spaces)
            return
        if (yield from text.until(Marks(*self.ends), output.reasoning)):
            output.end_reasoning(text.num_bytes)
