"""Server-sent events, as their clients read them."""

from __future__ import annotations


class EventReader:
    """Reads the data of events from the bytes of a stream, as they come.

    Lines end with line feeds alone: what clients of HTTP take for lines also ends at U+2028, U+0085 and others, which
    JSON may have within a string.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of each line that ``piece`` completes; a line feed completes the last line of a stream."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        data = [line.removeprefix(b"data:") for line in lines if line.startswith(b"data:")]
        return [each.strip().decode("utf-8", "replace") for each in data]
