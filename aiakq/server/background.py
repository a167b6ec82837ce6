"""A server in a process of its own, for tests, the quickstart and benchmarks that start what they measure.

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

from aiakq.arguments.server import API_KEY_VARIABLE, checked
from aiakq.errors import AiakqError, error
from aiakq.server.process.ipc import Failed, failed, on_hangup, rebuilt
from aiakq.server.telemetry.events import OnEvent, ServerEvent

_COMMAND = ("-P", "-c", "from aiakq.server.background import main; main()")


class _Told(msgspec.Struct):
    """One line from the server's process: an event, or the failure that ended it."""

    event: ServerEvent | None = None
    failure: Failed | None = None


class RunningServer:
    """A started server. ``events`` grows as the server tells more; ``ready`` is the event that said where it is."""

    def __init__(self, process: subprocess.Popen[bytes], ours: socket.socket, on_event: OnEvent | None) -> None:
        self.process = process
        self.events: list[ServerEvent] = []
        self.ready: ServerEvent | None = None
        self._socket = ours
        self._on_event = on_event
        self._outcome: queue.SimpleQueue[AiakqError | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="server-events", daemon=True).start()

    @property
    def url(self) -> str:
        """Where it answers, like http://127.0.0.1:41234."""
        assert self.ready is not None, "the server is not ready"
        return self.ready.url

    def wait_ready(self, timeout: float) -> None:
        """Wait until requests are answered. Raises what kept the server from starting."""
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
        """End it in order, as SIGTERM does; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._socket.close()

    def _listen(self) -> None:
        """Read what the server tells until it ends."""
        told_outcome = False
        with self._socket.makefile("rb") as lines:
            for line in lines:
                told = msgspec.json.decode(line, type=_Told)
                if told.event is not None:
                    if told.event.kind == "ready":
                        self.ready = told.event
                    self.events.append(told.event)
                    if self._on_event is not None:
                        self._on_event(told.event)
                    if told.event.kind == "ready":
                        told_outcome = True
                        self._outcome.put(None)
                elif told.failure is not None:
                    told_outcome = True
                    self._outcome.put(rebuilt(told.failure))
        if not told_outcome:
            hint = "Its own last lines are above."
            self._outcome.put(error("engine_start", reason="the server's process ended", hint=hint))


def start_in_background(
    args: Mapping[str, Any], on_event: OnEvent | None = None, timeout: float = 600.0
) -> RunningServer:
    """Start ``aiakq serve`` with ``args`` (defaults filled in) and wait until it is ready; use as a context manager.

    port      0 if not given: any free one.
    on_event  is called in a thread with the server's events.
    Raises what ``launch.serve`` raises. The server ends when this process does.
    """
    settled = checked({"port": 0} | dict(args), server=True)
    ours, theirs = socket.socketpair()
    # Whoever starts it uses it, too, and knows only the keys that ``args`` name.
    environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *_COMMAND, str(theirs.fileno())],
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,
            process_group=0,
        )
    ours.sendall(msgspec.json.encode(settled) + b"\n")
    server = RunningServer(process, ours, on_event)
    server.wait_ready(timeout)
    return server


def main() -> None:
    """Entry point of the background process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    peer = socket.socket(fileno=int(sys.argv[1]))
    with peer.makefile("rb") as lines:
        args = msgspec.json.decode(lines.readline())
    on_hangup(peer, _follow_starter)
    from aiakq.server.launch import serve

    def tell(told: _Told) -> None:
        try:
            peer.sendall(msgspec.json.encode(told) + b"\n")
        except OSError:  # the starter is gone; the hang-up ends us
            pass

    try:
        code = serve(args, lambda event: tell(_Told(event=event)))
    except AiakqError as failure:
        tell(_Told(failure=failed(failure)))
        code = failure.exit_code
    sys.exit(code)


def _follow_starter() -> None:
    """End in order, without making anybody wait for a drain."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
