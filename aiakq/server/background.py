"""Starts a server in a background process, for tests, the quickstart and benchmarks.

with start_in_background({"model": "folder", "port": 0}) as server:
    httpx.get(server.url + "/v1/models")
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType

import msgspec

from aiakq.arguments.server import KEY_VARIABLES, ServerArguments, checked
from aiakq.errors import AiakqError, error
from aiakq.server.telemetry.events import OnEvent, ServerEvent
from aiakq.system.channel import Channel, Disconnected
from aiakq.system.child import Child, child_command, follow, parent_socket

_CODE = "from aiakq.server.background import main; main()"


class _Arguments(msgspec.Struct, tag="arguments"):
    """The arguments of the server."""

    arguments: ServerArguments


class _Report(msgspec.Struct, tag="report"):
    """An event of the server."""

    event: ServerEvent


_Channel = Channel[_Arguments, _Report]


class RunningServer:
    """A running server. ``events`` holds all events so far; ``ready`` is the event with the address."""

    def __init__(self, child: Child, channel: _Channel, on_event: OnEvent | None) -> None:
        self.process = child.process
        self._child = child
        self.events: list[ServerEvent] = []
        self.ready: ServerEvent | None = None
        self._channel = channel
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
            self._channel.close()
            raise failure

    def stop(self, timeout: float = 60.0) -> int:
        """Shut the server down with SIGTERM and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        self._child.end(timeout)
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
        self._channel.close()

    def _listen(self) -> None:
        """Read messages until the server exits."""
        reason, hint = "the server's process ended", "Its last output is above."
        failed = error("engine_start", reason=reason, hint=hint)
        self._outcome.put(follow(self._child, self._channel, self._on_report, lambda reason: failed))

    def _on_report(self, report: _Report) -> None:
        event = report.event
        if event.kind == "ready":
            self.ready = event
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)
        if event.kind == "ready":
            self._outcome.put(None)


def start_in_background(
    args: Mapping[str, object], on_event: OnEvent | None = None, timeout: float = 600.0
) -> RunningServer:
    """Context manager: start ``aiakq serve`` with ``args`` (defaults filled in) and wait until it is ready.

    port      defaults to 0, any free port.
    on_event  called with every event, in another thread.
    Raises the errors of ``launch.serve``. The server exits when this process does.
    """
    checked_args = checked({"port": 0} | dict(args), server=True)
    # The caller also sends requests and knows only the keys in ``args``.
    environment = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
    child = Child(child_command(_CODE), environment)
    channel = _Channel(child.sockets[0], _Report)
    channel.send(_Arguments(checked_args))
    server = RunningServer(child, channel, on_event)
    server.wait_ready(timeout)
    return server


def main() -> None:
    """Entry point of the background process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel: Channel[_Report, _Arguments] = Channel(parent_socket(), _Arguments)
    given = channel.receive()
    if given is None:
        sys.exit(0)
    channel.on_hangup(_stop_with_parent)
    from aiakq.server.launch import serve

    def on_event(event: ServerEvent) -> None:
        with contextlib.suppress(Disconnected):  # the hang-up ends this process
            channel.send(_Report(event))

    try:
        code = serve(given.arguments, on_event)
    except AiakqError as failure:
        channel.send_failure(failure)
        code = failure.exit_code
    sys.exit(code)


def _stop_with_parent() -> None:
    """Shut down gracefully when the parent exits; a second signal interrupts the drain."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
