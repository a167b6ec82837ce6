"""ThoughtTracker: where the tokens of a sequence are in its thoughts, and which token has to end one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from aiakq.runtime.protocol.thought_budget import ThoughtBudget
from aiakq.runtime.protocol.vocabulary import Vocabulary

_BLANKS = b" \t\r\n"
#: Maximum bytes of a character.
_CHARACTER = 4


class _State(IntEnum):
    """begins: only white space and maybe a part of a start mark so far. inside: a thought. ends: it is being ended.
    answer: another thought may come. done: none may.
    """

    BEGINS = 0
    INSIDE = 1
    ENDS = 2
    ANSWER = 3
    DONE = 4


class SpelledBudget:
    """A budget for one vocabulary: what its tokens and marks spell. Shared by the trackers of a sequence."""

    def __init__(self, budget: ThoughtBudget, vocabulary: Vocabulary) -> None:
        self.budget = budget
        self.starts = [mark.lstrip().encode() for mark in budget.starts]
        self.ends = [mark.encode() for mark in budget.ends]
        self._tokens = vocabulary.tokens
        marks = (*self.starts, *self.ends)
        #: Special tokens that are no part of a mark. They are not text, and so end a mark or a character.
        self._silent = {id for id in vocabulary.special_ids if not any(vocabulary.tokens[id] in mark for mark in marks)}
        added = {vocabulary.tokens[id]: id for id in (*vocabulary.added_ids, *vocabulary.special_ids)}
        self.start_ids = {added[mark] for mark in self.starts if mark in added} if budget.repeats else set()
        self.num_kept = max(*(len(mark) - 1 for mark in marks), _CHARACTER)

    def text_of(self, token: int) -> bytes | None:
        """UTF-8 bytes of ``token``; None for one that is not text."""
        return None if token in self._silent or token >= len(self._tokens) else self._tokens[token]


class ThoughtTracker:
    """Follows the tokens of a sequence. What it says is a function of the budget and these tokens.

    Marks are found in what the tokens spell: a token may be a part of a mark, or more than one.
    """

    __slots__ = ("_count", "_last", "_may_repeat", "_num_ended", "_spelled", "_state", "_text")

    def __init__(self, spelled: SpelledBudget) -> None:
        budget = spelled.budget
        self._spelled = spelled
        self._state = _State.INSIDE if budget.is_open else _State.ANSWER if budget.anywhere else _State.BEGINS
        self._count = 0  # tokens of the thought
        self._text = b""  # the last bytes of the text
        self._last: list[int] = []  # the last tokens of the thought, which may be the first of ``end_ids``
        self._num_ended = 0  # of ``end_ids``
        self._may_repeat = budget.is_open  # whether the start mark of the prompt may come once more

    def copy(self) -> ThoughtTracker:
        """A tracker after the same tokens."""
        other = ThoughtTracker.__new__(ThoughtTracker)
        other._spelled, other._state, other._count = self._spelled, self._state, self._count
        other._text, other._last, other._num_ended = self._text, self._last, self._num_ended
        other._may_repeat = self._may_repeat
        return other

    @property
    def is_done(self) -> bool:
        """Whether no thought can come any more."""
        return self._state is _State.DONE

    @property
    def is_ending(self) -> bool:
        """Whether a part of the end has come."""
        return self._state is _State.ENDS or self._overlap() > 0

    @property
    def forced(self) -> int | None:
        """The token that has to come next; None if any may."""
        end_ids = self._spelled.budget.end_ids
        if self._state is _State.ENDS:
            return end_ids[self._num_ended]
        return end_ids[self._overlap()] if self._is_used_up() else None

    def add(self, token: int) -> None:
        """Follow ``token``."""
        if self._state is _State.DONE:
            return
        if self._is_used_up():
            self._state, self._num_ended = _State.ENDS, self._overlap()
        text = self._spelled.text_of(token)
        if self._state is _State.ENDS:
            self._num_ended += 1
            if self._num_ended == len(self._spelled.budget.end_ids):
                self._leave(b"")
        elif self._state is _State.INSIDE:
            self._think(token, text)
        elif self._state is _State.BEGINS:
            self._begin(text)
        elif token in self._spelled.start_ids:
            self._enter(b"")
        elif self._spelled.budget.anywhere:
            self._answer(text)

    def _is_used_up(self) -> bool:
        """Whether the thought has to be ended here, which is not within a character."""
        if self._state is not _State.INSIDE or self._count < self._spelled.budget.max_tokens:
            return False
        return not _ends_within_character(self._text)

    def _overlap(self) -> int:
        """How many of the first ``end_ids`` the thought ends with."""
        end_ids, last = self._spelled.budget.end_ids, self._last
        longest = min(len(end_ids) - 1, len(last))
        return next((count for count in range(longest, 0, -1) if last[-count:] == end_ids[:count]), 0)

    def _enter(self, text: bytes) -> None:
        """A thought begins with ``text``, which is behind its start mark in the same token."""
        self._state, self._count, self._text, self._last, self._may_repeat = _State.INSIDE, 0, b"", [], False
        if text:
            self._think(-1, text)

    def _leave(self, text: bytes) -> None:
        """A thought has ended; ``text`` is behind its end mark in the same token."""
        budget = self._spelled.budget
        self._state = _State.ANSWER if budget.anywhere or self._spelled.start_ids else _State.DONE
        self._text, self._last = b"", []
        if budget.anywhere:
            self._answer(text)

    def _think(self, token: int, text: bytes | None) -> None:
        spelled = self._spelled
        self._count += 1
        num_last = len(spelled.budget.end_ids) - 1
        self._last = [*self._last, token][-num_last:] if num_last else []
        if text is None:
            self._text = b""
            return
        whole = self._text + text
        end = _behind_first(spelled.ends, whole)
        if end is not None:
            self._leave(end)
            return
        if self._may_repeat:
            whole = whole.lstrip(_BLANKS)
            start = _behind_start(spelled.starts, whole)
            if start is not None:
                self._enter(start)
                return
            self._may_repeat = _may_start(spelled.starts, whole)
        self._text = whole if self._may_repeat else whole[-spelled.num_kept :]

    def _begin(self, text: bytes | None) -> None:
        spelled = self._spelled
        whole = (self._text + (text or b"")).lstrip(_BLANKS)
        start = _behind_start(spelled.starts, whole)
        if start is not None:
            self._enter(start)
        elif text is not None and _may_start(spelled.starts, whole):
            self._text = whole
        else:
            self._state, self._text = _State.ANSWER if spelled.start_ids else _State.DONE, b""

    def _answer(self, text: bytes | None) -> None:
        """Look for the start mark of another thought."""
        if text is None:
            self._text = b""
            return
        whole = self._text + text
        start = _behind_first(self._spelled.starts, whole)
        if start is not None:
            self._enter(start)
        else:
            self._text = whole[-self._spelled.num_kept :]


def _behind_first(marks: Sequence[bytes], text: bytes) -> bytes | None:
    """What is behind the first of ``marks`` in ``text``; None if there is none."""
    found = [(at, at + len(mark)) for mark in marks if (at := text.find(mark)) >= 0]
    return text[min(found)[1] :] if found else None


def _behind_start(starts: Sequence[bytes], text: bytes) -> bytes | None:
    """What is behind the longest start mark that ``text`` begins with; None if there is none."""
    mark = max((mark for mark in starts if text.startswith(mark)), key=len, default=None)
    return None if mark is None else text[len(mark) :]


def _may_start(starts: Sequence[bytes], text: bytes) -> bool:
    """Whether ``text`` is empty or the first part of a start mark."""
    return any(mark.startswith(text) for mark in starts)


def _ends_within_character(text: bytes) -> bool:
    """Whether the last bytes of ``text`` are the first ones of a character of UTF-8, but not all of them."""
    for back in range(1, min(_CHARACTER, len(text) + 1)):
        byte = text[-back]
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
