"""FirstWorker: all workers of a quantization, from the view of worker 0, which is this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from aiakq.errors import error
from aiakq.quantizers.workers.other_worker import OtherWorker
from aiakq.quantizers.workers.protocol import Task, Value, owners


class FirstWorker:
    """Worker 0: receives what the others compute, in a fixed order, and sends each of them what it lacks.

    Without others, it is the only worker. The others exit when this is closed.
    """

    rank = 0

    def __init__(self, others: Sequence[OtherWorker] = (), closed: Callable[[], None] = lambda: None) -> None:
        """closed: called after the others have exited."""
        self._others, self._closed = list(others), closed
        self.size = 1 + len(self._others)

    def combine(
        self, count: int, own: Iterable[list[Value]], merge: Callable[[list[Value], list[Value]], None]
    ) -> list[Value]:
        mine = iter(own)
        total: list[Value] = []
        for part in range(count):
            owner = part % self.size
            values = next(mine) if owner == 0 else self._others[owner - 1].values()
            if part == 0:
                total = values
            else:
                merge(total, values)
        # Exhaust the generator, which may have work left after its last part.
        assert next(mine, None) is None
        self._send(total)
        return total

    def share(self, tasks: Sequence[Task]) -> list[list[Value]]:
        ranks = owners(tasks, self.size)
        results: dict[int, list[Value]] = {index: task.run() for index, task in enumerate(tasks) if ranks[index] == 0}
        for index, owner in enumerate(ranks):
            if owner != 0:
                results[index] = self._others[owner - 1].values()
        for index, owner in enumerate(ranks):
            self._send(results[index], without=owner)
        return [results[index] for index in range(len(tasks))]

    def broadcast(self, rank: int, make: Callable[[], list[Value]]) -> list[Value]:
        values = make() if rank == 0 else self._others[rank - 1].values()
        self._send(values, without=rank)
        return values

    def agree(self, digest: int) -> None:
        for other in self._others:
            if other.values() != [digest]:
                reason = "it computes other numbers: its processor or its libraries differ"
                raise error("worker_failed", worker=other.rank, reason=reason)

    def _send(self, values: list[Value], without: int = 0) -> None:
        for other in self._others:
            if other.rank != without:
                other.send(values)

    def __enter__(self) -> FirstWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the other workers."""
        others, self._others = self._others, []
        for other in others:
            other.hang_up()
        for other in others:
            other.end()
        self._closed()
