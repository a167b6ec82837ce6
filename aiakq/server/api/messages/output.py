"""The content blocks of a response, and the stream events that transmit them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from aiakq.server.api.output.events import ArgumentsPiece, CallEnded, CallStarted, ContentPiece, Event, ReasoningPiece
from aiakq.server.http.streaming import NamedEvent


class TextBlock(msgspec.Struct, tag="text"):
    """Text of the answer."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """The reasoning. ``signature`` is its hash, which is not verified when a client sends it back."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A tool call. Arguments that are truncated or not an object become the string ``arguments`` in ``input``."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class TextDelta(msgspec.Struct, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta"):
    partial_json: str


class BlockStartEvent(NamedEvent, kw_only=True):
    """The start of a block."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: Block


class BlockDeltaEvent(NamedEvent, kw_only=True):
    """An increment of the open block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStopEvent(NamedEvent, kw_only=True):
    """The end of the open block."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class ContentBlocks:
    """Builds the blocks of one response from the events of its message.

    blocks  complete blocks.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._call: CallStarted | None = None
        self._kind: type[Event] | None = None  # of the open block: ReasoningPiece, ContentPiece or CallStarted
        self._texts: list[str] = []

    def add(self, events: Iterable[Event]) -> Iterator[NamedEvent]:
        """Return the stream events for more events of the message."""
        for event in events:
            if isinstance(event, CallEnded):
                yield from self.close()
            elif isinstance(event, CallStarted):
                yield from self.close()
                self._call = event
                yield self._open(CallStarted, ToolUseBlock(event.id, event.name, {}))
            elif isinstance(event, ArgumentsPiece):
                yield self._more(event.text, InputJsonDelta(event.text))
            elif isinstance(event, ReasoningPiece):
                if self._kind is not ReasoningPiece:
                    yield from self.close()
                    yield self._open(ReasoningPiece, ThinkingBlock("", ""))
                yield self._more(event.text, ThinkingDelta(event.text))
            else:
                if self._kind is not ContentPiece:
                    yield from self.close()
                    yield self._open(ContentPiece, TextBlock(""))
                yield self._more(event.text, TextDelta(event.text))

    def close(self) -> Iterator[NamedEvent]:
        """Return the stream events that end the open block, if there is one."""
        if self._kind is None:
            return
        block = self._block()
        if isinstance(block, ThinkingBlock):
            yield BlockDeltaEvent(index=len(self.blocks), delta=SignatureDelta(block.signature))
        yield BlockStopEvent(index=len(self.blocks))
        self.blocks.append(block)
        self._kind = None

    def _open(self, kind: type[Event], block: Block) -> BlockStartEvent:
        self._kind = kind
        self._texts = []
        return BlockStartEvent(index=len(self.blocks), content_block=block)

    def _more(self, text: str, delta: TextDelta | ThinkingDelta | InputJsonDelta) -> BlockDeltaEvent:
        self._texts.append(text)
        return BlockDeltaEvent(index=len(self.blocks), delta=delta)

    def _block(self) -> Block:
        """Return the open block with all of its text."""
        text = "".join(self._texts)
        if self._kind is ContentPiece:
            return TextBlock(text)
        if self._kind is ReasoningPiece:
            return ThinkingBlock(text, hashlib.sha256(text.encode(errors="replace")).hexdigest()[:32])
        assert self._call is not None
        return ToolUseBlock(self._call.id, self._call.name, _arguments(text))


def _arguments(text: str) -> dict[str, object]:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}
