"""TokenText: the tokens of a sequence as a string, which is searched at the speed of memory."""

from __future__ import annotations

import sys

_NUM_CHARACTERS = sys.maxunicode + 1


class TokenText:
    """The last tokens of a sequence, one character each: nothing has to be indexed to find where some occurred.

    start  number of the first token; those before it were dropped.
    """

    def __init__(self) -> None:
        self.start = 0
        self._text = ""

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self._text)

    def extend(self, token_ids: list[int]) -> None:
        """Append those of ``token_ids``, which begin with all tokens so far, that are new."""
        known = self.start + len(self._text)
        if known < len(token_ids):
            self._text += _as_text(token_ids[known:])

    def drop(self, count: int) -> None:
        """Drop the first ``count`` tokens."""
        self._text = self._text[count:]
        self.start += count

    def find_last(self, size: int, before: int | None = None) -> int | None:
        """Where the last ``size`` tokens occurred last: the number of tokens before the end of that occurrence; None if
        they did not. Only occurrences that end before ``before`` count, and the one at the very end does not.
        """
        text = self._text
        if size > len(text):
            return None
        end = len(text) - 1 if before is None else before - 1 - self.start
        at = text.rfind(text[len(text) - size :], 0, max(end, 0))
        return None if at < 0 else self.start + at + size


def _as_text(token_ids: list[int]) -> str:
    """One character per token. Of more tokens than there are characters, some share one: a wrong match proposes draft
    tokens that are rejected.
    """
    try:
        return "".join(map(chr, token_ids))
    except ValueError:
        return "".join([chr(token % _NUM_CHARACTERS) for token in token_ids])
