"""The log-probabilities of the tokens of an answer, without those of reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from aiakq.server.api.output.events import CallStarted, ContentPiece, Event, ReasoningPiece


class TextLogprobs:
    """Finds the tokens of each piece of the answer.

    Pieces are parts of the generated text, in its order; between them, the text has marks, white space and calls.
    """

    def __init__(self) -> None:
        self._text = ""
        self._starts: list[int] = []
        self._entries: list[object] = []
        self._next = 0  # first token that belongs to no piece yet
        self._cursor = 0  # end of the last piece, in characters
        self._has_calls = False

    def add(self, text: str, starts: Sequence[int], entries: Sequence[object]) -> None:
        """Add generated text, and the offsets in characters and the log-probabilities of its tokens."""
        self._text += text
        self._starts += starts
        self._entries += entries

    def of(self, event: Event) -> list[object]:
        """Return the log-probabilities of the next event of the message; empty unless it is text of the answer.

        A token belongs to the first piece that has a part of it. Also empty if the text was changed, so that its tokens
        are not known.
        """
        if isinstance(event, CallStarted):
            self._has_calls = True
        if not isinstance(event, (ContentPiece, ReasoningPiece)) or not event.text:
            return []
        # The arguments of a call can contain the text that follows it.
        search = self._text.rfind if self._has_calls else self._text.find
        start = search(event.text, self._cursor)
        if start < 0:
            return []
        self._cursor = end = start + len(event.text)
        found = []
        while self._next < len(self._starts) and self._starts[self._next] < end:
            if self._end_of(self._next) > start:
                found.append(self._entries[self._next])
            self._next += 1
        return found if isinstance(event, ContentPiece) else []

    def _end_of(self, index: int) -> int:
        return self._starts[index + 1] if index + 1 < len(self._starts) else len(self._text)
