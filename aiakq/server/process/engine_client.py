"""EngineClient: starts the engine process, exchanges messages with it, and detects its exit."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence

from aiakq.arguments.argument import part_of
from aiakq.arguments.engine import EngineArguments
from aiakq.arguments.server import KEY_VARIABLES, ServerArguments
from aiakq.errors import error
from aiakq.runtime.protocol.output import StepOutput
from aiakq.server.process.ipc import (
    AdapterChecked,
    Configured,
    FromEngine,
    Loading,
    Ready,
    Start,
    Started,
    Stepped,
    ToEngine,
)
from aiakq.system.async_channel import AsyncChannel
from aiakq.system.child import Child, child_command
from aiakq.system.threads import limit_threads, spin_briefly

_CODE = "from aiakq.server.process.engine_process import main; main()"


class EngineClient:
    """One engine process and the socket to it. Every method runs on the event loop."""

    def __init__(self, child: Child, channel: AsyncChannel[ToEngine, FromEngine]) -> None:
        self._child, self._channel = child, channel

    @classmethod
    async def start(
        cls, arguments: ServerArguments, cpus: Sequence[int] = (), threads: int | None = None, replica: int = 0
    ) -> EngineClient:
        """Start the process and send it the engine arguments. Raises ``engine_start`` if that fails.

        cpus     processors that it may use; empty for all.
        threads  number of compute threads, unless OMP_NUM_THREADS is set; None for one per processor.
        replica  index among the server's engines.
        """
        environment = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
        spin_briefly(environment)
        if threads is not None and not cpus:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        limit_threads(environment)
        try:
            child = Child(child_command(_CODE), environment)
        except OSError as failure:
            raise error("engine_start", reason=str(failure), hint="Check free memory and process limits.") from None
        client = cls(child, await AsyncChannel[ToEngine, FromEngine].open(child.sockets[0], FromEngine))
        engine = EngineArguments(**part_of(EngineArguments, arguments))  # not the keys of the server
        client.send(Start(engine, list(cpus), replica, arguments.data_parallel_size))
        return client

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, record: ToEngine) -> None:
        """Queue one record for the engine. Does nothing if the engine is gone."""
        self._channel.send(record)

    async def load(self, on_configured: Callable[[Configured], None], on_phase: Callable[[Loading], None]) -> Ready:
        """Wait until the engine is ready. Raises the AiakqError that kept it from loading, or ``engine_start``."""
        while (record := await self._channel.receive()) is not None:
            if isinstance(record, Configured):
                on_configured(record)
            elif isinstance(record, Loading):
                on_phase(record)
            elif isinstance(record, Ready):
                return record
        reason = await self._exit_reason()
        raise error("engine_start", reason=reason, hint="Its last output is above; often it ran out of memory.")

    async def steps(self) -> AsyncIterator[StepOutput | Started | AdapterChecked]:
        """Yield the output of every step, before it the requests that start in it, and checked adapters.

        Raises the engine's error, or ``engine_dead``, when the process ends.
        """
        while (record := await self._channel.receive()) is not None:
            if isinstance(record, Stepped):
                yield record.output
            elif isinstance(record, Started | AdapterChecked):
                yield record
        raise error("engine_dead", reason=await self._exit_reason())

    async def stop(self, timeout: float = 3.0) -> None:
        """End the process: close the socket, wait ``timeout`` seconds, then kill it."""
        self._channel.close()
        await self._child.end_soon(timeout)

    async def abort(self) -> None:
        """Abort a process that hangs, after it has written its threads' stacks to standard error if it can."""
        self._child.process.send_signal(signal.SIGABRT)
        await self._child.exited(1.0)
        self.kill()

    def kill(self) -> None:
        """Kill the process. Does nothing if it has ended."""
        self._child.kill()

    async def _exit_reason(self) -> str:
        await self._child.exited(5.0)
        cause = " (a file of the model was cut off while it was read)"
        return self._child.exit_reason(0) + (cause if self._child.process.returncode == -signal.SIGBUS else "")
