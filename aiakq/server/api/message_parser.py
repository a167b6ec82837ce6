"""MessageParser: incrementally parse the text of a generated message into events.

Reasoning comes first, then the answer with tool calls. The result does not depend on how the text is split into pieces.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aiakq.runtime.protocol.thought_budget import ThoughtMarks
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.runtime.text.tools_in_text import DEFAULT_SYNTAX, CallSyntax
from aiakq.server.api.output.events import Event, EventSink
from aiakq.server.api.output.scanner import Parsing, TextScanner
from aiakq.server.api.reasoning_parsers.base import ReasoningParser
from aiakq.server.api.tool_parsers.base import ToolParser, read_message


@dataclass(frozen=True)
class MessageFormat:
    """The format in which the model writes reasoning and tool calls.

    tool_parser       parser of tool calls, or None.
    reasoning_parser  parser of reasoning, or None to leave it in the answer.
    auto_tool_choice  whether the model may decide to call tools.
    thought_marks     marks around thoughts, for those that are ended; None if they are not known.
    call_syntax       how the prompt says to write calls if the chat template has no place for tools.
    """

    tool_parser: type[ToolParser] | None = None
    reasoning_parser: type[ReasoningParser] | None = None
    auto_tool_choice: bool = False
    call_syntax: CallSyntax = DEFAULT_SYNTAX
    thought_marks: ThoughtMarks | None = None

    def special_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the special tokens that are part of a parser's marks and must be kept in the text."""
        marks: list[str] = []
        if self.tool_parser is not None:
            marks += self.tool_parser.marks
        if self.reasoning_parser is not None:
            reasoning = self.reasoning_parser
            marks += (*reasoning.starts, *reasoning.ends, *reasoning.marks)
        if not marks:
            return frozenset()
        texts = {id: tokenizer.token_text(id) for id in tokenizer.special_ids}
        return frozenset(id for id, text in texts.items() if text and any(text in mark for mark in marks))


class MessageParser:
    """The parser of one message."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        seed: str = "",
        max_calls: int | None = None,
        only_calls: bool = False,
    ) -> None:
        """
        seed        determines the ids of calls.
        max_calls   number of calls beyond which calls are dropped.
        only_calls  whether the answer consists of calls: the beginning of one that was cut off is no content.
        """
        make_id = tools.call_id if tools is not None else ToolParser.call_id
        self._text = TextScanner()
        self._output = EventSink(lambda index: make_id(f"{seed}/{index}"), max_calls, self._text, only_calls)
        self._is_new = True
        self._only_calls = only_calls
        self._reasoning, self._tools = reasoning, tools
        if reasoning is not None:
            reasoning.tools = tools
        self._parsing = self._parse()
        next(self._parsing, None)

    @property
    def has_valid_calls(self) -> bool:
        """Whether there are calls, and all of them have ended and have a JSON object as arguments."""
        return self._output.has_valid_calls

    @property
    def has_reasoning(self) -> bool:
        return self._output.has_reasoning

    @property
    def reasoning_bytes(self) -> int | None:
        """UTF-8 length of the text up to the end of the reasoning; None if it is absent or has not ended."""
        return self._output.reasoning_bytes

    def feed(self, text: str, ended: bool = False) -> list[Event]:
        """Parse more text and return its events; ``ended`` also flushes pending text.

        In a message that is passed as a whole, a call that is malformed or cut off is content. In parts, its beginning
        may have been returned before.
        """
        if ended and self._is_new and not self._only_calls:
            self._text.keep_parts()
            self._output.holds_calls = True
        self._is_new = False
        self._text.feed(text, ended)
        next(self._parsing, None)
        if ended:
            self._output.finish()
        return self._output.take()

    def _parse(self) -> Parsing[None]:
        if self._reasoning is not None:
            yield from self._reasoning.parse(self._text, self._output)
        if self._tools is not None and self._reasoning is not None:
            yield from self._reasoning.parse_answer(self._text, self._output)
        elif self._tools is not None:
            yield from read_message(self._tools, self._text, self._output)
        else:
            yield from self._text.rest(self._output.content)


class ReasoningTokens:
    """Counts the reasoning tokens of a message, from the number of bytes that each token adds to the text."""

    def __init__(self, parser: MessageParser, bytes_of: Callable[[int], int]) -> None:
        self._parser = parser
        self._bytes_of = bytes_of
        self._starts = array("q")
        self._end = 0

    def add(self, token_ids: Iterable[int]) -> None:
        """Add tokens whose text is passed to the parser."""
        for token in token_ids:
            self._starts.append(self._end)
            self._end += self._bytes_of(token)

    @property
    def count(self) -> int:
        """Return the number of tokens up to the end of the reasoning."""
        if not self._parser.has_reasoning:
            return 0
        end = self._parser.reasoning_bytes
        return len(self._starts) if end is None else bisect_left(self._starts, end)
