"""Starts a server in a background process, for tests, the quickstart and benchmarks.

with start_in_background({"model": "folder", "port": 0}) as server:
    httpx.get(server.url + "/v1/models")
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import msgspec

from aiakq.arguments.server import KEY_VARIABLES, checked
from aiakq.errors import AiakqError, error
from aiakq.server.process.ipc import Failed, call_on_hangup, decode_error, encode_error
from aiakq.server.telemetry.events import OnEvent, ServerEvent
from aiakq.system.child import CHILD_OPTIONS, child_command, end_child

_CODE = "from aiakq.server.background import main; main()"


class _Report(msgspec.Struct):
    """A message from the server's process: an event, or the error that it exited with."""

    event: ServerEvent | None = None
    failure: Failed | None = None


class RunningServer:
    """A running server. ``events`` holds all events so far; ``ready`` is the event with the address."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, on_event: OnEvent | None) -> None:
        self.process = process
        self.events: list[ServerEvent] = []
        self.ready: ServerEvent | None = None
        self._socket = sock
        self._on_event = on_event
        self._outcome: queue.SimpleQueue[AiakqError | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="server-events", daemon=True).start()

    @property
    def url(self) -> str:
        """Address of the server, like http://127.0.0.1:41234."""
        assert self.ready is not None, "the server is not ready"
        return self.ready.url

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server is ready. Raises the error that it failed to start with."""
        try:
            failure = self._outcome.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            failure = error("engine_start", reason=f"it was not ready after {timeout:g} s", hint="Allow more time.")
        if failure is not None:
            self.process.wait()
            self._socket.close()
            raise failure

    def stop(self, timeout: float = 60.0) -> int:
        """Shut the server down with SIGTERM and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        end_child(self.process, timeout)
        return self.process.wait()

    def kill(self) -> None:
        """Kill the server process."""
        self.process.kill()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._socket.close()

    def _listen(self) -> None:
        """Read messages until the server exits."""
        has_outcome = False
        with self._socket.makefile("rb") as lines:
            for line in lines:
                report = msgspec.json.decode(line, type=_Report)
                if report.event is not None:
                    if report.event.kind == "ready":
                        self.ready = report.event
                    self.events.append(report.event)
                    if self._on_event is not None:
                        self._on_event(report.event)
                    if report.event.kind == "ready":
                        has_outcome = True
                        self._outcome.put(None)
                elif report.failure is not None:
                    has_outcome = True
                    self._outcome.put(decode_error(report.failure))
        if not has_outcome:
            hint = "Its last output is above."
            self._outcome.put(error("engine_start", reason="the server's process ended", hint=hint))


def start_in_background(
    args: Mapping[str, Any], on_event: OnEvent | None = None, timeout: float = 600.0
) -> RunningServer:
    """Context manager: start ``aiakq serve`` with ``args`` (defaults filled in) and wait until it is ready.

    port      defaults to 0, any free port.
    on_event  called with every event, in another thread.
    Raises the errors of ``launch.serve``. The server exits when this process does.
    """
    checked_args = checked({"port": 0} | dict(args), server=True)
    ours, theirs = socket.socketpair()
    # The caller also sends requests and knows only the keys in ``args``.
    environment = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
    with theirs:
        process = subprocess.Popen(
            child_command(_CODE, theirs.fileno()), env=environment, pass_fds=(theirs.fileno(),), **CHILD_OPTIONS
        )
    ours.sendall(msgspec.json.encode(checked_args) + b"\n")
    server = RunningServer(process, ours, on_event)
    server.wait_ready(timeout)
    return server


def main() -> None:
    """Entry point of the background process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    peer = socket.socket(fileno=int(sys.argv[1]))
    with peer.makefile("rb") as lines:
        args = msgspec.json.decode(lines.readline())
    call_on_hangup(peer, _stop_with_parent)
    from aiakq.server.launch import serve

    def send(report: _Report) -> None:
        try:
            peer.sendall(msgspec.json.encode(report) + b"\n")
        except OSError:  # the parent is gone; the hang-up ends this process
            pass

    try:
        code = serve(args, lambda event: send(_Report(event=event)))
    except AiakqError as failure:
        send(_Report(failure=encode_error(failure)))
        code = failure.exit_code
    sys.exit(code)


def _stop_with_parent() -> None:
    """Shut down gracefully when the parent exits; a second signal interrupts the drain."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
