"""TextOffsets: the places of tokens in a text, in characters."""

from __future__ import annotations

import codecs

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Computes text offsets of tokens in characters. A token within a character has the offset of that character."""

    def __init__(self, start: int = 0) -> None:
        self._next = start
        self._decoder = _Utf8Decoder("replace")

    def add(self, data: bytes) -> int:
        """Return the offset of the next token, which adds ``data`` to the text."""
        continues = bool(data) and 0x80 <= data[0] < 0xC0
        if data and not continues:
            self._next += len(self._decoder.decode(b"", final=True))
        offset = self._next
        self._next += len(self._decoder.decode(data))
        return offset
