"""OtherWorker: worker 0's view of another worker."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.quantizers.workers.messages import Job, WorkerAlive, WorkerChannel, WorkerFailed
from aiakq.quantizers.workers.protocol import Value
from aiakq.system.frames import limit_sending

#: The code that a worker process runs.
CODE = "from aiakq.quantizers.worker_process import main; main()"
#: Seconds without a heartbeat after which a worker counts as hung.
TIME_LIMIT = 60.0
#: Number of messages buffered here before the worker has to wait.
_WAITING = 2


class WorkerProcess(Protocol):
    """The process of another worker."""

    def kill(self) -> None:
        """Kill the process immediately."""

    def end(self) -> None:
        """Wait for the process to exit after its socket was shut down; kill it if it does not."""

    def exit_reason(self) -> str:
        """Return why the process exited, as text."""


class OtherWorker:
    """One other worker: its process, and the thread that reads from its socket."""

    def __init__(self, process: WorkerProcess, sock: socket.socket, job: Job, samples: Sequence[Tensor]) -> None:
        """Send the worker its job."""
        self.rank = job.rank
        self._process = process
        self._arrived: queue.Queue[list[Value]] = queue.Queue(_WAITING)
        self._failure: AiakqError | None = None
        self._has_ended = threading.Event()
        self._closing = False
        self._last_sign = time.monotonic()
        limit_sending(sock, 1.0)
        self._channel = WorkerChannel(sock, self._on_receive, self._check)
        self._reader = threading.Thread(target=self._read, name=f"worker-{job.rank}", daemon=True)
        self._reader.start()
        try:
            self._channel.send(job)
            self._channel.send_values(list(samples))
        except BaseException:
            self.hang_up()
            self.end()
            raise

    def send(self, values: list[Value]) -> None:
        """Send a list of values. Raises ``worker_failed`` or ``worker_late``."""
        try:
            self._channel.send_values(values)
        except (ConnectionError, BrokenPipeError):
            self._has_ended.wait(5.0)
            self._check()
            raise error("worker_failed", worker=self.rank, reason="it closed its socket") from None

    def values(self) -> list[Value]:
        """Return the next list of values. Raises ``worker_failed``, ``worker_late``, or the error that ended the
        worker.
        """
        while True:
            try:
                return self._arrived.get(timeout=0.2)
            except queue.Empty:
                self._check()

    def hang_up(self) -> None:
        """Close the socket, which tells the worker to exit."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Wait for the process to exit; kill it if it does not."""
        self._process.end()
        self._reader.join(5.0)
        self._channel.socket.close()

    def _on_receive(self) -> None:
        self._last_sign = time.monotonic()

    def _check(self) -> None:
        """Raise the reason why the worker cannot continue, if there is one."""
        if self._has_ended.is_set() and self._arrived.empty():
            raise self._failure or error("worker_failed", worker=self.rank, reason=self._process.exit_reason())
        if time.monotonic() - self._last_sign > TIME_LIMIT and not self._arrived.full():
            raise error("worker_late", worker=self.rank, limit=TIME_LIMIT)

    def _read(self) -> None:
        try:
            while not self._closing and (message := self._channel.receive()) is not None:
                if isinstance(message, WorkerFailed):
                    self._failure = error(message.id, **message.fields)
                elif not isinstance(message, (WorkerAlive, Job)):
                    self._enqueue(message)
        except (OSError, ValueError):  # the worker sends unreadable data
            self._process.kill()
        self._has_ended.set()

    def _enqueue(self, values: list[Value]) -> None:
        while not self._closing:
            with contextlib.suppress(queue.Full):
                self._arrived.put(values, timeout=0.2)
                break
        self._on_receive()
