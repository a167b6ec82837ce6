"""StateRows: allocation of the rows in which the states of recurrent layers are stored.

Unlike keys and values, which are kept for every token, a recurrent layer has one state that every token updates. It is
stored at a few positions of a sequence only: at the end of each full page, from which a sequence with the same prefix
can continue, and at the last tokens of a running sequence.
"""

from __future__ import annotations

from aiakq.kernels.recurrent_types import StateContext
from aiakq.runtime.executor.sequences import SequenceState
from aiakq.runtime.protocol.step import Chunk


def states_per_sequence(num_drafts: int) -> int:
    """Return how many states are stored per running sequence whose chunks have up to ``num_drafts`` draft tokens.

    A chunk reads one state and writes those after its last token and after each token before it that may turn out to be
    the last: its draft tokens may be rejected, and a sampled token, which is then sampled from the last one again. The
    state that was read is preserved, because the chunk may have to run again.
    """
    return num_drafts + 3


class StateRows:
    """Maps states to rows: row 0 is the zero state, row p the state at the end of page p, then those of each slot.

    num_rows  total number of rows. Nothing reads the last one: steps write the states of their padding there.
    """

    def __init__(self, num_pages: int, page_size: int, num_slots: int, caching: bool, num_drafts: int = 0) -> None:
        """caching: whether prefix caching is enabled, which needs a state per page. num_drafts: see above."""
        self._page_size, self._caching = page_size, caching
        self._per_slot = states_per_sequence(num_drafts)
        self._first = num_pages if caching else 1
        self.num_rows = self._first + self._per_slot * num_slots + 1

    def context(self, chunks: list[Chunk], sequences: list[SequenceState]) -> StateContext:
        """Return the rows that ``chunks`` of ``sequences`` read and write; updates ``state_at`` of the sequences."""
        pairs = list(zip(chunks, sequences, strict=True))
        return StateContext([self._source(*pair) for pair in pairs], [self._saves(*pair) for pair in pairs])

    def last_position(self, sequence: SequenceState, most: int) -> int:
        """Return after how many tokens of ``sequence`` a chunk may begin: at most ``most``."""
        own = [position for position in self._positions(sequence) if position <= most]
        of_pages = most // self._page_size * self._page_size if self._caching else 0
        return max([*own, of_pages])

    def _positions(self, sequence: SequenceState) -> list[int]:
        """Return the positions of the states of ``sequence``, row by row; 0 for a row without one."""
        return sequence.state_at.setdefault(self, [0] * self._per_slot)

    def _source(self, chunk: Chunk, sequence: SequenceState) -> int:
        """Return the row of the state after ``chunk.first`` tokens."""
        first, positions = chunk.first, self._positions(sequence)
        # States of later tokens are invalid: their step was rejected or abandoned.
        positions[:] = [position if position <= first else 0 for position in positions]
        if first == 0:
            return 0
        if first in positions:
            return self._row(sequence, positions.index(first))
        page, rest = divmod(first, self._page_size)
        assert self._caching and not rest, f"the state after {first} tokens is not stored"
        return sequence.pages[page - 1]

    def _saves(self, chunk: Chunk, sequence: SequenceState) -> list[tuple[int, int]]:
        """Return the states to store, as (index of the token in the chunk, row)."""
        first, end, P = chunk.first, chunk.first + chunk.count, self._page_size
        saves = []
        if self._caching:
            saves = [(page * P - first - 1, sequence.pages[page - 1]) for page in range(first // P + 1, end // P + 1)]
        rejectable = len(chunk.drafts) + chunk.samples
        # Only a chunk that measures how long steps take has more draft tokens than there are states for.
        ends = range(max(first + 1, end - min(rejectable, self._per_slot - 2)), end + 1)
        # The oldest are overwritten, not the state that is read or those that are read after a rejection.
        positions = self._positions(sequence)
        order = sorted(range(self._per_slot), key=lambda index: positions[index])
        for index, position in zip(order, ends, strict=False):
            positions[index] = position
            saves.append((position - first - 1, self._row(sequence, index)))
        return sorted(saves)

    def _row(self, sequence: SequenceState, index: int) -> int:
        return self._first + self._per_slot * sequence.slot + index
