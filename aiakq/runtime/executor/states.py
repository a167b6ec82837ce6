"""StateRows: allocation of the rows in which the states of recurrent layers are stored.

Unlike keys and values, which are kept for every token, a recurrent layer has one state that every token updates. It is
stored at a few positions of a sequence only: at the end of each full page, from which a sequence with the same prefix
can continue, and at the last tokens of a running sequence.
"""

from __future__ import annotations

from aiakq.kernels.recurrent_types import StateContext
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.step import Chunk

#: Number of states stored per running sequence. A chunk reads one state and writes the state after its last token; if
#: it samples, it also writes the state before that token, which is recomputed if the sampled token is rejected. The
#: state that was read is preserved, because the chunk may have to run again.
RING = 3


class StateRows:
    """Maps states to rows: row 0 is the zero state, row p the state at the end of page p, then RING rows per slot.

    num_rows  total number of rows.
    """

    def __init__(self, num_pages: int, page_size: int, num_slots: int, caching: bool) -> None:
        """caching: whether prefix caching is enabled, which needs a state per page."""
        self._page_size, self._caching = page_size, caching
        self._first = num_pages if caching else 1
        self.num_rows = self._first + RING * num_slots

    def context(self, chunks: list[Chunk], sequences: list[SequenceState]) -> StateContext:
        """Return the rows that ``chunks`` of ``sequences`` read and write; updates ``state_at`` of the sequences."""
        pairs = list(zip(chunks, sequences, strict=True))
        return StateContext([self._source(*pair) for pair in pairs], [self._saves(*pair) for pair in pairs])

    def _source(self, chunk: Chunk, sequence: SequenceState) -> int:
        """Return the row of the state after ``chunk.first`` tokens."""
        first = chunk.first
        # States of later tokens are invalid: their step was rejected or abandoned.
        sequence.state_at = [
            None if position is None or position > first else position
            for position in sequence.state_at or [None] * RING
        ]
        if first == 0:
            return 0
        if first in sequence.state_at:
            return self._row(sequence, sequence.state_at.index(first))
        page, rest = divmod(first, self._page_size)
        assert self._caching and not rest, f"the state after {first} tokens is not stored"
        return sequence.pages[page - 1]

    def _saves(self, chunk: Chunk, sequence: SequenceState) -> list[tuple[int, int]]:
        """Return the states to store, as (index of the token in the chunk, row)."""
        first, end, P = chunk.first, chunk.first + chunk.count, self._page_size
        saves = []
        if self._caching:
            saves = [(page * P - first - 1, sequence.pages[page - 1]) for page in range(first // P + 1, end // P + 1)]
        ends = [end - 1, end] if chunk.samples and chunk.count > 1 else [end]
        state_at = sequence.state_at
        # Overwrite last the state that is read and, before it, the one that is read if the previous token is resampled.
        order = sorted(range(RING), key=lambda index: (state_at[index] == first, state_at[index] == first - 1))
        for index, position in zip(order, ends, strict=False):
            state_at[index] = position
            saves.append((position - first - 1, self._row(sequence, index)))
        return sorted(saves)

    def _row(self, sequence: SequenceState, index: int) -> int:
        return self._first + RING * sequence.slot + index
