"""Worker: the protocol from the view of a worker other than 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from aiakq.quantizers.workers.messages import WorkerChannel
from aiakq.quantizers.workers.protocol import Task, Value, owners


class FirstWorkerGone(Exception):
    """Raised when worker 0 has closed the socket."""


class Worker:
    """A worker other than 0."""

    def __init__(self, channel: WorkerChannel, rank: int, size: int) -> None:
        self._channel = channel
        self.rank = rank
        self.size = size

    def combine(
        self, count: int, own: Iterable[list[Value]], merge: Callable[[list[Value], list[Value]], None]
    ) -> list[Value]:
        for values in own:
            self._channel.send_values(values)
        return self._values()

    def share(self, tasks: Sequence[Task]) -> list[list[Value]]:
        who = owners(tasks, self.size)
        results = {index: task.run() for index, task in enumerate(tasks) if who[index] == self.rank}
        for values in results.values():  # only now, because worker 0 reads them after it has run its own tasks
            self._channel.send_values(values)
        return [results[index] if index in results else self._values() for index in range(len(tasks))]

    def broadcast(self, rank: int, make: Callable[[], list[Value]]) -> list[Value]:
        if rank != self.rank:
            return self._values()
        values = make()
        self._channel.send_values(values)
        return values

    def agree(self, digest: int) -> None:
        self._channel.send_values([digest])

    def _values(self) -> list[Value]:
        message = self._channel.receive()
        if message is None:
            raise FirstWorkerGone
        assert isinstance(message, list), "worker 0 sends values"
        return message
