"""GridPositions: the positions of a prompt's tokens if those of its images are in rows and columns (M-RoPE)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aiakq.runtime.protocol.media import MediaItem


class GridPositions:
    """Positions of the tokens of a sequence with images (Wang et al. 2024, arXiv:2409.12191).

    A token of text has one position. That of an image has three: where the image begins, and as many more as its row
    and its column. The text behind an image goes on at the first position that is larger than all of these.

    shift  what is added to the number of a token behind the last image to get its position.
    """

    def __init__(self, items: Sequence[MediaItem]) -> None:
        # (first token, token behind the last, position of the first, columns or 0 for text)
        self._runs: list[tuple[int, int, int, int]] = []
        token = position = 0
        for item in items:
            assert item.grid is not None
            rows, columns = item.grid
            self._runs.append((token, item.first, position, 0))
            position += item.first - token
            self._runs.append((item.first, item.end, position, columns))
            position += max(rows, columns)
            token = item.end
        self._runs.append((token, sys.maxsize, position, 0))
        self.shift = position - token

    def append(
        self, first: int, end: int, positions: list[int], grids: list[NDArray[np.int64]], grid_start: int
    ) -> None:
        """Append the positions of the tokens ``first`` to ``end`` - 1 to ``positions``, and the three positions of
        those of images to ``grids``, arrays [N, 3]; for these, ``positions`` has the numbers of rows, which begin at
        ``grid_start``.
        """
        for begin, behind, position, width in self._runs:
            low, high = max(begin, first), min(behind, end)
            if low >= high:
                continue
            if not width:
                positions += range(position + low - begin, position + high - begin)
                continue
            numbers = np.arange(low - begin, high - begin)
            row = grid_start + sum(map(len, grids))
            grids.append(np.stack([np.zeros_like(numbers), numbers // width, numbers % width], axis=1) + position)
            positions += range(row, row + high - low)


def grid_positions(items: Sequence[MediaItem]) -> GridPositions | None:
    """Return the positions in a prompt with ``items``; None if every token's position is its number."""
    return GridPositions(items) if any(item.grid is not None for item in items) else None
