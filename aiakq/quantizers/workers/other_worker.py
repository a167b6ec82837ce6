"""OtherWorker: worker 0's view of another worker."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Sequence

from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.quantizers.workers.messages import FirstChannel, Job, Values
from aiakq.quantizers.workers.protocol import Value
from aiakq.quantizers.workers.values import send_values, values_of
from aiakq.system.channel import Disconnected
from aiakq.system.child import Process, follow

#: The code that a worker process runs.
CODE = "from aiakq.quantizers.worker_process import main; main()"
#: Seconds without a heartbeat after which a worker counts as hung.
TIME_LIMIT = 60.0
#: Number of messages buffered here before the worker has to wait.
_WAITING = 2


class OtherWorker:
    """One other worker: its process, and the thread that reads from its socket."""

    def __init__(self, process: Process, sock: socket.socket, job: Job, samples: Sequence[Tensor]) -> None:
        """Send the worker its job."""
        self.rank = job.rank
        self._process = process
        self._arrived: queue.Queue[list[Value]] = queue.Queue(_WAITING)
        self._failure: AiakqError | None = None
        self._closing = False
        self._channel = FirstChannel(sock, Values)
        self._channel.limit_sending(1.0, self._check)
        self._reader = threading.Thread(target=self._read, name=f"worker-{job.rank}", daemon=True)
        self._reader.start()
        try:
            self._channel.send(job)
            send_values(self._channel, list(samples))
        except BaseException:
            self.hang_up()
            self.end()
            raise

    def send(self, values: list[Value]) -> None:
        """Send a list of values. Raises ``worker_failed`` or ``worker_late``."""
        try:
            send_values(self._channel, values)
        except Disconnected:
            self._reader.join(5.0)
            self._check()
            raise self._failed("it closed its socket") from None

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
        self._channel.hang_up()

    def end(self) -> None:
        """Wait for the process to exit; kill it if it does not."""
        self._process.end()
        self._reader.join(5.0)
        self._channel.close()

    def _check(self) -> None:
        """Raise the reason why the worker cannot continue, if there is one."""
        if not self._reader.is_alive() and self._arrived.empty():
            raise self._failure or self._failed(self._process.exit_reason())
        if time.monotonic() - self._channel.heard > TIME_LIMIT and not self._arrived.full():
            raise error("worker_late", worker=self.rank, limit=TIME_LIMIT)

    def _read(self) -> None:
        self._failure = follow(self._process, self._channel, self._enqueue, self._failed)

    def _failed(self, reason: str) -> AiakqError:
        return error("worker_failed", worker=self.rank, reason=reason)

    def _enqueue(self, record: Values) -> None:
        values = values_of(self._channel, record)
        while not self._closing:
            with contextlib.suppress(queue.Full):
                self._arrived.put(values, timeout=0.2)
                break
        self._channel.heard = time.monotonic()  # no heartbeat was read meanwhile
