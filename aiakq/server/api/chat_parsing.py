"""Message parsers of the choices of one chat request."""

from __future__ import annotations

from collections.abc import Sequence

from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.api.answer_grammar import MessageRequest, tool_parser_of
from aiakq.server.api.message_parser import MessageParser, ReasoningTokens
from aiakq.server.api.output.events import ContentPiece, Event, ReasoningPiece
from aiakq.server.api.renderer import Renderer
from aiakq.server.api.tools import forced_tools, tool_schemas

#: Number of tokens at the end of a prompt that are decoded to see whether it ends with a reasoning mark.
_TAIL_TOKENS = 32


class MessageParsers:
    """A parser for each choice.

    special_tokens  special tokens that must be kept in the text.
    """

    def __init__(
        self,
        parsers: Sequence[MessageParser],
        renderer: Renderer,
        special_tokens: frozenset[int],
        leaves_out_reasoning: bool,
    ) -> None:
        tokenizer = renderer.tokenizer
        left_out = tokenizer.special_ids - special_tokens
        self.special_tokens = special_tokens
        self._parsers = parsers
        self._leaves_out_reasoning = leaves_out_reasoning
        self._reasoning_tokens = [
            ReasoningTokens(parser, lambda id: 0 if id in left_out else len(tokenizer.token_bytes(id)))
            for parser in parsers
        ]

    @staticmethod
    def of(
        renderer: Renderer, request: MessageRequest, prompt: Prompt, request_id: str, count: int
    ) -> MessageParsers | None:
        """Return the parsers of ``count`` choices, or None if the text is returned unparsed."""
        format = renderer.message_format
        tool_parser = tool_parser_of(renderer, request)
        if not renderer.tokenizer.has_text or not (tool_parser is not None or format.reasoning_parser is not None):
            return None
        state = None if format.reasoning_parser is None else reasoning_state(renderer, request, prompt)
        forced = forced_tools(request.tools, request.tool_choice)
        schemas = tool_schemas(request.tools if forced is None else forced)
        max_calls = 1 if request.parallel_tool_calls is False else None
        parsers = [
            MessageParser(
                format.reasoning_parser(*state) if format.reasoning_parser is not None and state is not None else None,
                tool_parser(schemas) if tool_parser is not None else None,
                f"{request_id}/{index}",
                max_calls,
                only_calls=forced is not None,
            )
            for index in range(count)
        ]
        leaves_out_reasoning = request.include_reasoning is False
        return MessageParsers(parsers, renderer, renderer.kept_special_tokens, leaves_out_reasoning)

    def feed(self, index: int, delta: Delta, ended: bool) -> list[Event]:
        """Return the events of a choice's new text."""
        self._reasoning_tokens[index].add(delta.token_ids)
        events = self._parsers[index].feed(delta.text, ended)
        if self._leaves_out_reasoning:
            return [event for event in events if not isinstance(event, ReasoningPiece)]
        return events

    def has_valid_calls(self, index: int) -> bool:
        """Whether a choice has calls, all of which have ended and are valid."""
        return self._parsers[index].has_valid_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the number of reasoning tokens of all choices so far."""
        return sum(tokens.count for tokens in self._reasoning_tokens)


def events_of(messages: MessageParsers | None, index: int, delta: Delta, ended: bool) -> list[Event]:
    """Return the events of a choice's new text; without parsers, all of it is content."""
    if messages is not None:
        return messages.feed(index, delta, ended)
    return [ContentPiece(delta.text)] if delta.text else []


def reasoning_state(renderer: Renderer, request: MessageRequest, prompt: Prompt) -> tuple[bool, bool]:
    """Return whether ``prompt`` ends within reasoning, and whether it has ended it, so that there is no other."""
    parser = renderer.message_format.reasoning_parser
    assert parser is not None
    end = renderer.tokenizer.decode(prompt.token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    continued = _continued(request)
    return parser.opened_by(end, continued), parser.closed_by(end, continued)


def _continued(request: MessageRequest) -> str | None:
    """Return the text of the message that the model continues; "" if it starts a new one."""
    return request.messages[-1].text if request.continue_final_message else None
