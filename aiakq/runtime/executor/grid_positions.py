"""GridPositions: the positions of a prompt's tokens if its images and videos are in rows and columns (M-RoPE)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aiakq.runtime.protocol.media import MediaItem


@dataclass(frozen=True)
class _Run:
    """Tokens ``first`` .. ``end - 1`` of text, or of frames that follow each other.

    position  that of the first.
    columns   of a frame; 0 for text.
    size      tokens of a frame.
    times     positions in time of the frames [F], beginning with 0.
    """

    first: int
    end: int
    position: int
    columns: int = 0
    size: int = 1
    times: NDArray[np.int64] | None = None

    def grid(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the three positions [high - low, 3] of the tokens ``low`` .. ``high - 1`` of frames."""
        assert self.times is not None
        frames, numbers = np.divmod(np.arange(low - self.first, high - self.first), self.size)
        rows, columns = np.divmod(numbers, self.columns)
        return np.stack([self.times[frames], rows, columns], axis=1) + self.position


class GridPositions:
    """Positions of the tokens of a sequence with images and videos (Wang et al. 2024, arXiv:2409.12191).

    A token of text has one position. That of an image has three: where the image begins, and as many more as its row
    and its column; those of a frame of a video begin later by its time. The text behind an image or video goes on at
    the first position that is larger than all of these.

    shift  what is added to the number of a token behind the last image to get its position.
    """

    def __init__(self, items: Sequence[MediaItem]) -> None:
        self._runs: list[_Run] = []
        token = position = 0
        for item in items:
            assert item.grid is not None
            rows, columns = item.grid
            times = np.array(item.times or [0], dtype=np.int64)
            for first, count in item.places:
                self._runs.append(_Run(token, first, position))
                position += first - token
                token = first + count
                self._runs.append(_Run(first, token, position, columns, rows * columns, times))
                position += max(rows, columns, int(times[-1]) + 1)
        self._runs.append(_Run(token, sys.maxsize, position))
        self.shift = position - token

    def append(
        self, first: int, end: int, positions: list[int], grids: list[NDArray[np.int64]], grid_start: int
    ) -> None:
        """Append the positions of the tokens ``first`` to ``end`` - 1 to ``positions``, and the three positions of
        those of images to ``grids``, arrays [N, 3]; for these, ``positions`` has the numbers of rows, which begin at
        ``grid_start``.
        """
        for run in self._runs:
            low, high = max(run.first, first), min(run.end, end)
            if low >= high:
                continue
            if not run.columns:
                positions += range(run.position + low - run.first, run.position + high - run.first)
                continue
            row = grid_start + sum(map(len, grids))
            grids.append(run.grid(low, high))
            positions += range(row, row + high - low)


def grid_positions(items: Sequence[MediaItem]) -> GridPositions | None:
    """Return the positions in a prompt with ``items``; None if every token's position is its number."""
    return GridPositions(items) if any(item.grid is not None for item in items) else None
