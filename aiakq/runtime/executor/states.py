"""StateRows: which rows of a recurrent layer's states belong to what.

Keys and values of a token stay where they were written; a recurrent layer has one state, which every token changes. So
it is kept at a few points of a sequence only: at the end of each full page, where a sequence that shares the pages
before may start, and at the last tokens of a running sequence.
"""

from __future__ import annotations

from aiakq.kernels.recurrent_types import StateContext
from aiakq.runtime.engine.records import Chunk
from aiakq.runtime.executor.sequences import SequenceState

#: States of a running sequence. A chunk reads one, and writes the state after its last token; if it samples, also the
#: one before that token, which is computed again if the sample was not valid. It leaves the one it read: it may have to
#: run again.
RING = 3


class StateRows:
    """Gives each state a row: row 0 is zeros, row p the state at the end of page p, then come those of the slots.

    num_rows  of all these.
    """

    def __init__(self, num_pages: int, page_size: int, num_slots: int, caching: bool) -> None:
        """caching: whether sequences may start after pages that others filled."""
        self._page_size, self._caching = page_size, caching
        self._first = num_pages if caching else 1
        self.num_rows = self._first + RING * num_slots

    def context(self, chunks: list[Chunk], sequences: list[SequenceState]) -> StateContext:
        """Which rows ``chunks`` of ``sequences`` read and write; what they write is noted in ``sequences``."""
        pairs = list(zip(chunks, sequences, strict=True))
        return StateContext([self._source(*pair) for pair in pairs], [self._saves(*pair) for pair in pairs])

    def _source(self, chunk: Chunk, sequence: SequenceState) -> int:
        """The row of the state after ``chunk.first`` tokens."""
        first = chunk.first
        # States of later tokens are computed anew, because the step was not valid, or did not run to its end.
        sequence.state_at = [None if at is None or at > first else at for at in sequence.state_at or [None] * RING]
        if first == 0:
            return 0
        if first in sequence.state_at:
            return self._row(sequence, sequence.state_at.index(first))
        page, rest = divmod(first, self._page_size)
        assert self._caching and not rest, f"the state after {first} tokens was not kept"
        return sequence.pages[page - 1]

    def _saves(self, chunk: Chunk, sequence: SequenceState) -> list[tuple[int, int]]:
        """The states to keep: (token of the chunk, row)."""
        first, end, P = chunk.first, chunk.first + chunk.count, self._page_size
        saves = []
        if self._caching:
            saves = [(page * P - first - 1, sequence.pages[page - 1]) for page in range(first // P + 1, end // P + 1)]
        kept = [end - 1, end] if chunk.samples and chunk.count > 1 else [end]
        at = sequence.state_at
        # Last of all the state that is read, and before it the one that is read if the token before is sampled again.
        order = sorted(range(RING), key=lambda place: (at[place] == first, at[place] == first - 1))
        for place, position in zip(order, kept, strict=False):
            at[place] = position
            saves.append((position - first - 1, self._row(sequence, place)))
        return sorted(saves)

    def _row(self, sequence: SequenceState, place: int) -> int:
        return self._first + RING * sequence.slot + place
