"""Worker: the protocol from the view of a worker other than 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from aiakq.quantizers.workers.messages import WorkerChannel
from aiakq.quantizers.workers.protocol import Task, Value, owners
from aiakq.quantizers.workers.values import receive_values, send_values


class Worker:
    """A worker other than 0. Its methods raise ``Disconnected`` when worker 0 is gone."""

    def __init__(self, channel: WorkerChannel, rank: int, size: int) -> None:
        self._channel = channel
        self.rank = rank
        self.size = size

    def combine(
        self, count: int, own: Iterable[list[Value]], merge: Callable[[list[Value], list[Value]], None]
    ) -> list[Value]:
        for values in own:
            send_values(self._channel, values)
        return receive_values(self._channel)

    def share(self, tasks: Sequence[Task]) -> list[list[Value]]:
        ranks = owners(tasks, self.size)
        results = {index: task.run() for index, task in enumerate(tasks) if ranks[index] == self.rank}
        for values in results.values():  # only now, because worker 0 reads them after it has run its own tasks
            send_values(self._channel, values)
        return [results[index] if index in results else receive_values(self._channel) for index in range(len(tasks))]

    def broadcast(self, rank: int, make: Callable[[], list[Value]]) -> list[Value]:
        if rank != self.rank:
            return receive_values(self._channel)
        values = make()
        send_values(self._channel, values)
        return values

    def agree(self, digest: int) -> None:
        send_values(self._channel, [digest])
