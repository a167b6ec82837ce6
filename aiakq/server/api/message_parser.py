"""MessageParser: the text of one generated message, in pieces of any size, as events.

Reasoning comes first, then the answer with calls of tools. The same text gives the same reasoning, content and calls
however it was cut into pieces.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.api.output.events import Event, EventSink
from aiakq.server.api.output.scanner import Marks, Parsing, TextScanner
from aiakq.server.api.reasoning_parsers.base import ReasoningParser
from aiakq.server.api.tool_parsers.base import ToolParser

#: A mark that no text holds: all of it is passed on.
_NOTHING = Marks("\ud800")


@dataclass(frozen=True)
class MessageFormat:
    """How the served model writes reasoning and calls.

    tool_parser       None: calls are not looked for.
    reasoning_parser  None: reasoning is not told apart from the answer.
    auto_tool_choice  whether the model may decide to call tools.
    """

    tool_parser: type[ToolParser] | None = None
    reasoning_parser: type[ReasoningParser] | None = None
    auto_tool_choice: bool = False

    def special_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The special tokens that are, or are part of, marks of the parsers: they have to stay in the text."""
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
    ) -> None:
        """``seed`` determines the ids of calls; calls beyond ``max_calls`` are dropped."""
        make_id = tools.call_id if tools is not None else ToolParser.call_id
        self._text = TextScanner()
        self._output = EventSink(lambda index: make_id(f"{seed}/{index}"), max_calls)
        self._reasoning, self._tools = reasoning, tools
        if reasoning is not None:
            reasoning.tools = tools
        self._parsing = self._parse()
        self._advance()

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._output.num_calls

    @property
    def has_reasoning(self) -> bool:
        return self._output.has_reasoning

    @property
    def reasoning_bytes(self) -> int | None:
        """UTF-8 bytes of the text up to the end of the reasoning; None if there is none or it has not ended."""
        return self._output.reasoning_bytes

    def feed(self, text: str, ended: bool = False) -> list[Event]:
        """The events of more text; with ``ended`` of all that is left."""
        self._text.feed(text, ended)
        self._advance()
        if ended:
            self._output.finish()
        return self._output.take()

    def _advance(self) -> None:
        """Parse as far as the text goes."""
        next(self._parsing, None)

    def _parse(self) -> Parsing[None]:
        if self._reasoning is not None:
            yield from self._reasoning.parse(self._text, self._output)
        if self._tools is not None:
            yield from self._tools.parse(self._text, self._output)
        yield from self._text.until(_NOTHING, self._output.content)


class ReasoningTokens:
    """Counts the tokens of a message that are reasoning, from the bytes that each of them adds to the text."""

    def __init__(self, parser: MessageParser, bytes_of: Callable[[int], int]) -> None:
        self._parser = parser
        self._bytes_of = bytes_of
        self._starts = array("q")
        self._end = 0

    def add(self, token_ids: Iterable[int]) -> None:
        """Tokens whose text the parser gets."""
        for token in token_ids:
            self._starts.append(self._end)
            self._end += self._bytes_of(token)

    @property
    def count(self) -> int:
        """The tokens up to the end of the reasoning."""
        if not self._parser.has_reasoning:
            return 0
        end = self._parser.reasoning_bytes
        return len(self._starts) if end is None else bisect_left(self._starts, end)
