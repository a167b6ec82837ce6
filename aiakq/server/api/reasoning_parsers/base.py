"""ReasoningParser: separate the reasoning before an answer, which is between two marks."""

from __future__ import annotations

from typing import ClassVar

from aiakq.runtime.protocol.thought_budget import ThoughtMarks
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.scanner import MarkFound, Parsing, TextScanner, marks_of
from aiakq.server.api.reasoning_parsers.thought import Thought
from aiakq.server.api.tool_parsers.base import ToolParser, read_message


class ReasoningParser:
    """A parser of one message. Most subclasses only define marks.

    starts, ends    marks around the reasoning. Special tokens among them are kept in the text.
    marks           additional marks that are special tokens.
    has_answer_mark  whether one of ``ends`` starts the answer.
    open_default    whether the message begins with reasoning if the prompt does not show it.
    template_marks  strings that identify a chat template of this format; empty if it cannot be detected.
    is_open         whether this message begins with reasoning, whose start mark is in the prompt.
    is_closed       whether the prompt has ended the reasoning, so that all of this message is the answer.
    tools           parser of its tool calls, or None.
    """

    tools: ToolParser | None = None

    starts: ClassVar[tuple[str, ...]] = ("<think>",)
    ends: ClassVar[tuple[str, ...]] = ("</think>",)
    marks: ClassVar[tuple[str, ...]] = ()
    has_answer_mark: ClassVar[bool] = True
    open_default: ClassVar[bool] = False
    template_marks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, is_open: bool, is_closed: bool = False) -> None:
        self.is_open, self.is_closed = is_open, is_closed

    @classmethod
    def thought_marks(cls) -> ThoughtMarks | None:
        """Return the marks around the thoughts that ``parse`` finds; None if a subclass finds others."""
        is_own = cls.parse is ReasoningParser.parse
        return ThoughtMarks(cls.starts, cls.ends, cls.ends[0]) if is_own and cls.starts and cls.ends else None

    @classmethod
    def opened_by(cls, prompt: str, continued: str | None = None) -> bool:
        """Whether ``prompt`` ends within reasoning, so that the message begins with it.

        continued  text of the message that the model continues, if any.
        """
        if continued is not None and continued.strip():
            last_start = max((continued.rfind(mark) for mark in cls.starts), default=-1)
            last_end = max((continued.rfind(mark) for mark in cls.ends), default=-1)
            return last_start > last_end
        end = prompt.rstrip()
        return end.endswith(cls.starts) or (cls.open_default and not end.endswith(cls.ends))

    @classmethod
    def closed_by(cls, prompt: str, continued: str | None = None) -> bool:
        """Whether the answer begins in ``prompt``, so that the message has no reasoning. Parameters: ``opened_by``."""
        if continued is not None and continued.strip():
            return not cls.opened_by(prompt, continued)
        return prompt.rstrip().endswith(cls.ends)

    def parse(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        """Read ``text`` up to the start of the answer, and pass reasoning to ``output``.

        The reasoning also ends before a call, if the message ends without an end mark; see ``Thought``.
        """
        if self.is_closed:
            return
        spaces = yield from text.skip_spaces()
        mark = yield from text.match(*self.starts)
        if not mark and not self.is_open:
            output.content(spaces)
            return
        thought = None if self.tools is None else Thought(self.tools, output, text.num_bytes)
        if (yield from text.until(marks_of(*self.ends), output.reasoning if thought is None else thought.add)):
            if thought is not None:
                thought.close()
            output.end_reasoning(text.num_bytes)
        elif thought is not None:
            thought.end()

    def parse_answer(self, text: TextScanner, output: EventSink) -> Parsing[None]:
        """Read ``text``, which is the answer, with the parser ``tools``.

        A thought that opens in it is part of the answer, and the same holds for the calls in it as in ``parse``.
        """
        assert self.tools is not None
        if self.is_closed or type(self).thought_marks() is None:
            yield from read_message(self.tools, text, output)
            return
        output.content((yield from text.skip_spaces()))
        mark = yield from text.match(*self.starts)  # not taken for the beginning of a call: it may begin with a bracket
        is_later = False
        while True:
            if not mark:
                text.watch(marks_of(*self.starts), output.content)
                try:
                    yield from read_message(self.tools, text, output, is_later=is_later)
                    return
                except MarkFound as found:
                    mark = found.mark
                text.watch(None, output.content)
            output.content(mark)
            thought = Thought(self.tools, output, text.num_bytes, in_answer=True)
            end = yield from text.until(marks_of(*self.ends), thought.add)
            if not end:
                thought.end()
                return
            thought.close()
            output.content(end)
            mark, is_later = "", True
