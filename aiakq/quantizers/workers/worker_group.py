"""WorkerGroup: starts the other workers of a quantization, and is worker 0 of them."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.quantizers.workers.messages import Job, WorkerAlive, WorkerChannel, WorkerFailed
from aiakq.quantizers.workers.protocol import Task, Value, owners
from aiakq.system.frames import limit_sending
from aiakq.system.processes import end_child, exit_reason, start_child
from aiakq.system.threads import RestoreThreads
from aiakq.system.topology import cpu_shares

#: Seconds without any sign of a worker after which it counts as hung.
TIME_LIMIT = 60.0
#: Messages of a worker that wait here before it has to wait itself.
_WAITING = 2
_CODE = "from aiakq.quantizers.worker_process import main; main()"


class Link(Protocol):
    """The way to one other worker."""

    rank: int

    def send(self, values: list[Value]) -> None: ...

    def values(self) -> list[Value]:
        """The next list of values that the worker sends."""
        ...


class FirstWorker:
    """Worker 0: it receives what the others compute, in a fixed order, and sends each what it lacks."""

    rank = 0

    def __init__(self, others: Sequence[Link] = ()) -> None:
        self._links = list(others)
        self.size = 1 + len(self._links)

    def combine(
        self, count: int, own: Iterable[list[Value]], merge: Callable[[list[Value], list[Value]], None]
    ) -> list[Value]:
        mine = iter(own)
        total: list[Value] = []
        for part in range(count):
            owner = part % self.size
            values = next(mine) if owner == 0 else self._links[owner - 1].values()
            if part == 0:
                total = values
            else:
                merge(total, values)
        # The generator may have something to do after its last part.
        assert next(mine, None) is None
        self._send(total)
        return total

    def share(self, tasks: Sequence[Task]) -> list[list[Value]]:
        who = owners(tasks, self.size)
        found: dict[int, list[Value]] = {index: task.run() for index, task in enumerate(tasks) if who[index] == 0}
        for index, owner in enumerate(who):
            if owner != 0:
                found[index] = self._links[owner - 1].values()
        for index, owner in enumerate(who):
            self._send(found[index], without=owner)
        return [found[index] for index in range(len(tasks))]

    def broadcast(self, rank: int, make: Callable[[], list[Value]]) -> list[Value]:
        values = make() if rank == 0 else self._links[rank - 1].values()
        self._send(values, without=rank)
        return values

    def agree(self, digest: int) -> None:
        for other in self._links:
            if other.values() != [digest]:
                reason = "it computes other numbers: its processor or its libraries differ"
                raise error("worker_failed", worker=other.rank, reason=reason)

    def _send(self, values: list[Value], without: int = 0) -> None:
        for other in self._links:
            if other.rank != without:
                other.send(values)


class WorkerGroup(FirstWorker):
    """Worker 0, and the others as child processes. Until it is closed, this process has a worker's share of the threads
    and of the processors.
    """

    def __init__(self, job: Job, samples: Sequence[Tensor] | None) -> None:
        """Start workers 1 to ``job.size`` - 1. ``rank``, ``threads`` and ``cpus`` of ``job`` are filled in for each.

        Raises ``worker_failed``.
        """
        super().__init__()
        self.size = job.size
        self._restore = RestoreThreads(torch.get_num_threads(), torch.set_num_threads)
        threads, cpus = max(1, torch.get_num_threads() // self.size), cpu_shares(self.size)
        self._others: list[_Worker] = []
        try:
            for rank in range(1, self.size):
                own = msgspec.structs.replace(job, rank=rank, threads=threads, cpus=cpus[rank])
                self._others.append(_Worker(own, list(samples or ())))
        except BaseException:
            self.close()
            raise
        self._links = list(self._others)
        torch.set_num_threads(threads)
        if cpus[0]:
            os.sched_setaffinity(0, cpus[0])

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the other workers. Later calls do nothing."""
        others, self._others = self._others, []
        for other in others:
            other.hang_up()
        for other in others:
            other.end()
        self._restore()


class _Worker:
    """One other worker: its process, and the thread that reads from it."""

    def __init__(self, job: Job, samples: list[Value]) -> None:
        self.rank = job.rank
        self._arrived: queue.Queue[list[Value]] = queue.Queue(_WAITING)
        self._failure: AiakqError | None = None
        self._ended = threading.Event()
        self._closing = False
        self._last_sign = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._process = start_child(_CODE, theirs.fileno(), pass_fds=(theirs.fileno(),), threads=job.threads)
        except OSError as failure:
            ours.close()
            raise error("worker_failed", worker=job.rank, reason=f"it could not be started: {failure}") from None
        finally:
            theirs.close()
        limit_sending(ours, 1.0)
        self._channel = WorkerChannel(ours, self._heard, self._check)
        self._reader = threading.Thread(target=self._read, name=f"worker-{job.rank}", daemon=True)
        self._reader.start()
        try:
            self._channel.send(job)
            self._channel.send_values(samples)
        except BaseException:
            self.hang_up()
            self.end()
            raise

    def send(self, values: list[Value]) -> None:
        """Send a list of values. Raises ``worker_failed`` or ``worker_late``."""
        try:
            self._channel.send_values(values)
        except (ConnectionError, BrokenPipeError):
            self._ended.wait(5.0)
            self._check()
            raise error("worker_failed", worker=self.rank, reason="it closed its socket") from None

    def values(self) -> list[Value]:
        """The next list of values. Raises ``worker_failed`` or ``worker_late``, or the error the worker ended with."""
        while True:
            try:
                return self._arrived.get(timeout=0.2)
            except queue.Empty:
                self._check()

    def hang_up(self) -> None:
        """Close the socket, which is the signal to end."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Wait for the end of the process; kill it if it does not come."""
        end_child(self._process)
        self._reader.join(5.0)
        self._channel.socket.close()

    def _heard(self) -> None:
        self._last_sign = time.monotonic()

    def _check(self) -> None:
        """Raise why the worker cannot go on, if it cannot."""
        if self._ended.is_set() and self._arrived.empty():
            raise self._failure or error("worker_failed", worker=self.rank, reason=exit_reason(self._process))
        if time.monotonic() - self._last_sign > TIME_LIMIT and not self._arrived.full():
            raise error("worker_late", worker=self.rank, limit=TIME_LIMIT)

    def _read(self) -> None:
        try:
            while not self._closing and (message := self._channel.receive()) is not None:
                if isinstance(message, WorkerFailed):
                    self._failure = error(message.id, **message.fields)
                elif not isinstance(message, (WorkerAlive, Job)):
                    self._put(message)
        except (OSError, ValueError):  # it sends nothing that can be read
            self._process.kill()
        self._ended.set()

    def _put(self, values: list[Value]) -> None:
        while not self._closing:
            with contextlib.suppress(queue.Full):
                self._arrived.put(values, timeout=0.2)
                break
        self._heard()
