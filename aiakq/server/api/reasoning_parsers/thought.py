"""Thought: the reasoning of a message, which a tool call may end without an end mark.

If the thought is closed, all of its text is reasoning, also the calls that it mentions. If the message ends within the
thought, the thought ended before the first complete call of a known tool whose arguments match the tool's schema. Text
from such a call on is held back until the thought is closed or the message ends.
"""

from __future__ import annotations

from collections import deque

from aiakq.server.api.output.checked_calls import CheckedCalls
from aiakq.server.api.output.events import EventSink
from aiakq.server.api.output.scanner import TextScanner, num_bytes_of
from aiakq.server.api.output.schema_check import Budget
from aiakq.server.api.tool_parsers.base import ToolParser, read_message

#: Maximum number of characters that are held back. Beyond it, they are reasoning, also if they contain calls.
MAX_HELD = 1 << 20


class Thought:
    """Passes the text of a thought on to ``output``, except what may turn out to be a call."""

    def __init__(self, tools: ToolParser, output: EventSink, num_bytes: int, in_answer: bool = False) -> None:
        """
        num_bytes  UTF-8 length of the message up to the thought.
        in_answer  whether the thought is part of the answer, whose text it is.
        """
        self._tools, self._output, self._num_bytes = tools, output, num_bytes
        self._in_answer = in_answer
        self._emit = output.content if in_answer else output.reasoning
        self._held: deque[str] = deque()
        self._offset = 0  # of the first character of ``_held`` that has not been passed on
        self._num_held = 0
        self._budget = Budget()
        self._start()

    def add(self, text: str) -> None:
        """Add text of the thought."""
        marks = self._scanner.sought
        if marks is not None and not self._num_held and not marks.may_begin_in(text):  # the parser need not see it
            self._num_bytes += num_bytes_of(text)
            self._emit(text)
            return
        while text:
            room = MAX_HELD - self._num_held
            part, text = text[:room], text[room:]
            self._held.append(part)
            self._num_held += len(part)
            self._scanner.feed(part)
            self._parse()
            if self._num_held == MAX_HELD:
                self._pass_on(self._num_held)
                self._start()

    def close(self) -> None:
        """The thought is closed: what is held back is part of it."""
        self._pass_on(self._num_held)

    def end(self) -> None:
        """The message ends in the thought: it ended before the first call, if there is one."""
        self._scanner.feed("", ended=True)
        self._parse()
        if not self._calls.found:
            self.close()
            return
        if not self._in_answer:
            self._output.end_reasoning(self._num_bytes)
        for replay in self._calls.found:
            replay(self._output)

    def _start(self) -> None:
        """Start to look for calls in the text that is added from now on."""
        self._scanner = TextScanner()
        self._scanner.keep_parts()
        self._calls = CheckedCalls(self._tools.enforced, self._scanner, self._budget)
        self._parsing = read_message(self._tools, self._scanner, self._calls, in_thought=True)
        self._num_passed = 0  # characters of the scanner's text that were passed on

    def _parse(self) -> None:
        next(self._parsing, None)
        self._pass_on(self._calls.num_chars_before - self._num_passed)

    def _pass_on(self, count: int) -> None:
        """Pass on the first ``count`` characters of the held text."""
        self._num_passed += count
        self._num_held -= count
        while count:
            first = self._held[0]
            piece = first[self._offset : self._offset + count]
            count -= len(piece)
            self._offset += len(piece)
            if self._offset == len(first):
                self._held.popleft()
                self._offset = 0
            self._num_bytes += num_bytes_of(piece)
            self._emit(piece)
