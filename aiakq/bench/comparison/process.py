"""SideProcess: start and control the worker process that measures one side of ``bench ab``."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

import msgspec

from aiakq.bench.comparison.sides import Side
from aiakq.errors import error
from aiakq.system.channel import Channel, Disconnected, InvalidMessage
from aiakq.system.child import Child

_WORKER = Path(__file__).with_name("worker.py")


class MeasureBatch(msgspec.Struct, tag="measure"):
    """Request to measure one batch of random prompts."""

    seed: int


class WorkerReply(msgspec.Struct, tag="reply"):
    """What the worker replies when it has loaded the model, and to every ``MeasureBatch``."""

    result: dict[str, object]


class SideProcess:
    """Worker process of one side. The constructor starts it, ``ready`` waits until it has loaded the model.

    Use it as a context manager, which kills the process on exit.

    load     batch_size, input_len and output_len.
    timeout  maximum seconds for each response.
    library  native library to load instead of the side's own, or None.
    """

    def __init__(self, side: Side, load: dict[str, int], timeout: float, library: Path | None) -> None:
        self._side, self._timeout = side, timeout
        settings = json.dumps({"side": side.label, "engine": dict(side.engine), **load})
        command = [side.interpreter, "-P", str(_WORKER), settings]
        self._child = Child(command, side.environment(library), keep_output=True)
        self._channel = Channel[MeasureBatch, WorkerReply](self._child.sockets[0], WorkerReply)

    def ready(self) -> dict[str, object]:
        """Wait until the model is loaded and return facts about the engine. Raises ``side_failed``."""
        return self._receive()

    def measure(self, seed: int) -> dict[str, object]:
        """Measure one batch; see ``worker.measure`` for the result. Raises ``side_failed``."""
        try:
            self._channel.send(MeasureBatch(seed))
        except Disconnected:
            raise self._failure(self._child.exit_reason()) from None
        return self._receive()

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Killed without a clean shutdown, which is slow with torch loaded; the worker has no state to save.
        self._child.kill()
        self._child.end()
        self._child.close()

    def _receive(self) -> dict[str, object]:
        try:
            reply = self._channel.receive(self._timeout)
        except TimeoutError:
            raise self._failure(f"no response within {self._timeout:g} s") from None
        except InvalidMessage as problem:
            raise self._failure(f"its response cannot be read: {problem}") from None
        if reply is None:
            raise self._failure(self._child.exit_reason())
        return reply.result

    def _failure(self, reason: str) -> Exception:
        return error("side_failed", side=self._side.label, reason=reason)
