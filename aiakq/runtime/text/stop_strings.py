"""StopStrings: ends a text at the first stop string, also at one that contains special tokens left out of the text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

#: Stand for special tokens: surrogates, which no text contains.
_FIRST_MARKER, _MAX_MARKERS = 0xD800, 2048
_MARKERS = re.compile("[\ud800-\udfff]")


class StopStrings:
    """The search in one text, which arrives in pieces. Text that may be the start of a stop string is held back.

    markers  special token -> its character in the pieces. The text without these is shown.
    """

    def __init__(self, stops: Sequence[str], hidden: Mapping[str, int], include: bool) -> None:
        """
        hidden   texts of special tokens that are left out of the text, and their ids.
        include  whether the stop string is part of the text.
        """
        self._stops = stops
        self._include = include
        self._held = ""
        self._longest = max(map(len, stops), default=0)
        names = {name for name in hidden if name and any(name in stop for stop in stops)}
        in_order = sorted(names, key=lambda name: (-len(name), name))[:_MAX_MARKERS]
        characters = {name: chr(_FIRST_MARKER + number) for number, name in enumerate(in_order)}
        self.markers = {hidden[name]: character for name, character in characters.items()}
        #: Stop strings with special tokens as characters -> the stop string.
        self._marked: dict[str, str] = {}
        if characters:
            pattern = re.compile("|".join(map(re.escape, in_order)))
            marked = {pattern.sub(lambda match: characters[match[0]], stop): stop for stop in stops}
            self._marked = {text: stop for text, stop in marked.items() if text != stop}

    def add(self, piece: str, may_stop: bool) -> tuple[str, str | None]:
        """Return the text that is released, and the stop string that ``piece`` completes, if ``may_stop``.

        Stop strings that were complete before do not count.
        """
        before, self._held = self._held, self._held + piece
        if may_stop and (found := self._first(before)):
            start, stop = found
            text, self._held = _shown(self._held[:start]) + (stop if self._include else ""), ""
            return text, stop
        keep = self._num_kept()
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return _shown(text) if self._marked else text, None

    def rest(self) -> str:
        """Return the text that is held back, at the end."""
        text, self._held = _shown(self._held), ""
        return text

    def _first(self, before: str) -> tuple[int, str] | None:
        """Return the position and name of the first stop string in the held text that is not in ``before``."""
        shown, length = (_shown(self._held), len(_shown(before))) if self._marked else (self._held, len(before))
        found = [
            (start, stop) for stop in self._stops if (start := shown.find(stop, max(0, length - len(stop) + 1))) >= 0
        ]
        if not self._marked:
            return min(found, default=None)
        found = [(_position(self._held, start), stop) for start, stop in found]
        for text, stop in self._marked.items():
            start = self._held.find(text, max(0, len(before) - len(text) + 1))
            if start >= 0:
                found.append((start, stop))
        return min(found, default=None)

    def _num_kept(self) -> int:
        """Return the length of the longest suffix of the held text that may be the start of a stop string."""
        shown = _shown(self._held) if self._marked else self._held
        kept = _longest_start(shown, self._stops, self._longest)
        if not self._marked:
            return kept
        kept = len(self._held) - _position(self._held, len(shown) - kept)
        return max(kept, _longest_start(self._held, list(self._marked), self._longest))


def _longest_start(text: str, stops: Sequence[str], longest: int) -> int:
    for length in range(min(longest - 1, len(text)), 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0


def _shown(text: str) -> str:
    return _MARKERS.sub("", text)


def _position(text: str, shown: int) -> int:
    """Return the position in ``text`` of the character with number ``shown`` of the shown text; the end if none."""
    for position, character in enumerate(text):
        if not _MARKERS.match(character):
            if shown == 0:
                return position
            shown -= 1
    return len(text)
