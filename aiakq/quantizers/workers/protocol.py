"""The protocol of workers: computes shared results once and distributes them.

Every worker runs the same recipe over the same blocks, so that transforms and rounders need not know of other workers.
Results that all workers compute identically are not sent; three things are shared. Statistics of the calibration
samples are reduced by ``combine``: the batches are split into a number of shards that does not depend on the number of
workers, and sums are added in the order of the shards. Independent tasks are distributed by ``share``. Data that one
worker has is sent to the others by ``broadcast``. Every method returns the same bits on all workers, for any number of
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

#: Values that can be sent, in a flat list.
Value = Tensor | str | float | int | bool | None
#: Number of shards of the calibration batches, and thus the maximum number of workers with a shard.
SHARDS = 8


@dataclass(frozen=True)
class Task:
    """A piece of work that does not depend on others of the same call. ``cost`` is its relative duration."""

    cost: float
    run: Callable[[], list[Value]]


class Workers(Protocol):
    """All workers, seen from one of them. Every method is called by all workers in the same order.

    rank  index of this worker; 0 is the process that writes the output.
    size  number of workers.
    """

    rank: int
    size: int

    def combine(
        self, count: int, own: Iterable[list[Value]], merge: Callable[[list[Value], list[Value]], None]
    ) -> list[Value]:
        """Merge ``count`` parts in order. ``own`` yields this worker's parts: part p belongs to worker p % size.

        ``merge(total, part)`` modifies ``total``, which starts as the first part.
        """
        ...

    def share(self, tasks: Sequence[Task]) -> list[list[Value]]:
        """Return the results of ``tasks`` in order; each task is run by one worker."""
        ...

    def broadcast(self, rank: int, make: Callable[[], list[Value]]) -> list[Value]:
        """Return the result of ``make`` on worker ``rank``; it is not called on the others."""
        ...

    def agree(self, digest: int) -> None:
        """Raise ``worker_failed`` if the digests of the workers differ."""
        ...


def shards(batches: int) -> list[range]:
    """Split the batches into at most SHARDS runs of nearly equal length, none of them empty."""
    count = min(SHARDS, batches)
    return [range(number * batches // count, (number + 1) * batches // count) for number in range(count)]


def owners(tasks: Sequence[Task], size: int) -> list[int]:
    """Assign tasks to ``size`` workers: the longest first, each to the worker with the least work."""
    loads = [0.0] * size
    owner = [0] * len(tasks)
    for index in sorted(range(len(tasks)), key=lambda index: -tasks[index].cost):
        owner[index] = min(range(size), key=loads.__getitem__)
        loads[owner[index]] += tasks[index].cost
    return owner
