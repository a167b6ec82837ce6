"""Calls that are passed on only if they are complete, of a known tool, and match its schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiakq.server.api.output.events import EventSink, NoCall
from aiakq.server.api.output.json_values import decoded
from aiakq.server.api.output.scanner import TextScanner
from aiakq.server.api.output.schema_check import Budget, matches

#: Adds a call, or text after it, to another sink.
Replay = Callable[[EventSink], None]


class CheckedCalls(EventSink):
    """Collects calls, and refuses what is not a valid call with ``NoCall``.

    found             the first call and everything after it.
    num_chars_before  number of characters of the text that are not part of it.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, object]], text: TextScanner, budget: Budget) -> None:
        super().__init__(str, text=text)
        self._tools, self._budget = tools, budget
        self.holds_calls = True
        self.found: list[Replay] = []
        self.num_chars_before = 0

    def content(self, text: str) -> None:
        if text:
            self._text.begin_part()
        if self.found:
            self.found.append(lambda sink: sink.content(text))
        else:
            self.num_chars_before = self._text.num_chars

    #: The text of other channels.
    reasoning = content

    def end_reasoning(self, num_bytes: int) -> None:
        pass

    def start_call(self, name: str, id: str = "") -> None:
        super().start_call(name, id)
        if name not in self._tools:
            self._call = None
            raise NoCall

    def end_call(self, is_complete: bool = True) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        arguments = "".join(call.arguments) or "{}"
        value = decoded(arguments, strict=True, exact=True)
        if not is_complete or not isinstance(value, dict) or not matches(value, self._tools[call.name], self._budget):
            raise NoCall

        def replay(sink: EventSink) -> None:
            sink.start_call(call.name, call.id)
            sink.arguments(arguments)
            sink.end_call()

        self.found.append(replay)
        self._text.begin_part()
