"""The protocol of workers: what is computed once for all of them, and how each gets it.

Every worker runs the same recipe over the same blocks, so that transforms and rounders need to know nothing of the
others. What they do alike is not sent; three things are shared. Statistics of the calibration samples are gathered by
``combine``: the batches are cut into shards whose number does not depend on that of the workers, and sums are added up
in the order of the shards. Independent pieces of work are distributed by ``share``. What one worker alone has, it
passes on with ``broadcast``. All of them return the same bits on every worker, and with any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

#: What can be sent: a flat list of these.
Value = Tensor | str | float | int | bool | None
#: Into how many shards the calibration batches are cut, and so how many workers can have one.
SHARDS = 8


@dataclass(frozen=True)
class Task:
    """A piece of work that depends on no other of the same call. ``cost`` is its relative duration."""

    cost: float
    run: Callable[[], list[Value]]


class Workers(Protocol):
    """All workers, seen from one of them. Every method is called by all workers, in the same order.

    rank  the number of this one; 0 is the process that writes the output.
    size  how many there are.
    """

    rank: int
    size: int

    def combine(
        self, count: int, own: Iterable[list[Value]], merge: Callable[[list[Value], list[Value]], None]
    ) -> list[Value]:
        """Merge ``count`` parts in their order. ``own`` gives this worker's: part p belongs to worker p % size.

        ``merge(total, part)`` changes ``total``, which is the first part in the beginning.
        """
        ...

    def share(self, tasks: Sequence[Task]) -> list[list[Value]]:
        """The results of ``tasks``, in their order; each is run by one worker."""
        ...

    def broadcast(self, rank: int, make: Callable[[], list[Value]]) -> list[Value]:
        """What ``make`` returns on worker ``rank``; it is not called on the others."""
        ...

    def agree(self, digest: int) -> None:
        """Raise ``worker_failed`` if the workers have different digests."""
        ...


class OneProcess:
    """A single worker: this process."""

    rank = 0
    size = 1

    def combine(
        self, count: int, own: Iterable[list[Value]], merge: Callable[[list[Value], list[Value]], None]
    ) -> list[Value]:
        total: list[Value] | None = None
        for part in own:
            if total is None:
                total = part
            else:
                merge(total, part)
        assert total is not None, "there is at least one part"
        return total

    def share(self, tasks: Sequence[Task]) -> list[list[Value]]:
        return [task.run() for task in tasks]

    def broadcast(self, rank: int, make: Callable[[], list[Value]]) -> list[Value]:
        return make()

    def agree(self, digest: int) -> None:
        return None


def shards(batches: int) -> list[range]:
    """The batches cut into at most SHARDS runs of nearly equal length, none of them empty."""
    count = min(SHARDS, batches)
    return [range(number * batches // count, (number + 1) * batches // count) for number in range(count)]


def owners(tasks: Sequence[Task], size: int) -> list[int]:
    """Which of ``size`` workers runs each task: the longest first, each for the worker with least to do."""
    loads = [0.0] * size
    found = [0] * len(tasks)
    for index in sorted(range(len(tasks)), key=lambda index: -tasks[index].cost):
        found[index] = min(range(size), key=loads.__getitem__)
        loads[found[index]] += tasks[index].cost
    return found
