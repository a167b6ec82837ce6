"""EngineClient: starts the engine process, exchanges messages with it, and detects its exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from aiakq.arguments.engine import ENGINE_ARGUMENTS
from aiakq.arguments.server import KEY_VARIABLES
from aiakq.errors import error
from aiakq.runtime.engine.messages import StepOutput
from aiakq.server.process.ipc import (
    AdapterChecked,
    Configured,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Start,
    Started,
    Stepped,
    ToEngine,
    decode_error,
    decode_from_engine,
    frame,
    split,
)
from aiakq.system.child import CHILD_OPTIONS, child_command, describe_exit
from aiakq.system.threads import limit_threads, spin_briefly

_CODE = "from aiakq.server.process.engine_process import main; main()"
#: Size in bytes above which a frame takes milliseconds to decode, for example with prompt log-probabilities.
_LARGE_FRAME = 256 << 10


class EngineClient:
    """One engine process and the socket to it. Every method runs on the event loop."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.process = process
        self._reader = reader
        self._writer = writer
        self._buffer = bytearray()

    @classmethod
    async def start(
        cls, arguments: Mapping[str, Any], cpus: Sequence[int] = (), threads: int | None = None, replica: int = 0
    ) -> EngineClient:
        """Start the process and send it the engine arguments. Raises ``engine_start`` if that fails.

        cpus     processors that it may use; empty for all.
        threads  number of compute threads, unless OMP_NUM_THREADS is set; None for one per processor.
        replica  index among the server's engines.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
        spin_briefly(environment)
        if threads is not None and not cpus:
            environment.setdefault("OMP_NUM_THREADS", str(threads))
        limit_threads(environment)
        try:
            process = await asyncio.create_subprocess_exec(
                *child_command(_CODE, theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                env=environment,
                **CHILD_OPTIONS,
            )
        except OSError as failure:
            ours.close()
            raise error("engine_start", reason=str(failure), hint="Check free memory and process limits.") from None
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        client = cls(process, reader, writer)
        given = {row.name: arguments[row.name] for row in ENGINE_ARGUMENTS}
        client.send(Start(given, list(cpus), replica, arguments["data_parallel_size"]))
        return client

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, record: ToEngine) -> None:
        """Queue one record for the engine. Does nothing if the engine is gone."""
        if not self._writer.is_closing():
            self._writer.write(frame(record))

    async def load(self, on_configured: Callable[[Configured], None], on_phase: Callable[[Loading], None]) -> Ready:
        """Wait until the engine is ready. Raises the AiakqError that kept it from loading, or ``engine_start``."""
        async for record in self._records():
            if isinstance(record, Configured):
                on_configured(record)
            elif isinstance(record, Loading):
                on_phase(record)
            elif isinstance(record, Ready):
                return record
            elif isinstance(record, Failed):
                raise decode_error(record)
        reason = await self._exit_reason()
        raise error("engine_start", reason=reason, hint="Its last output is above; often it ran out of memory.")

    async def steps(self) -> AsyncIterator[StepOutput | Started | AdapterChecked]:
        """Yield the output of every step, before it the requests that start in it, and checked adapters.

        Raises the engine's error, or ``engine_dead``, when the process ends.
        """
        async for record in self._records():
            if isinstance(record, Stepped):
                yield record.output
            elif isinstance(record, Started | AdapterChecked):
                yield record
            elif isinstance(record, Failed):
                raise decode_error(record)
        raise error("engine_dead", reason=await self._exit_reason())

    async def stop(self, timeout: float = 3.0) -> None:
        """End the process: close the socket, wait ``timeout`` seconds, then kill it."""
        self._writer.close()
        try:
            await asyncio.wait_for(self.process.wait(), timeout)
        except TimeoutError:
            self.kill()
            await self.process.wait()

    async def abort(self) -> None:
        """Abort a process that hangs, after it has written its threads' stacks to standard error if it can."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGABRT)
        try:
            await asyncio.wait_for(self.process.wait(), 1.0)
        except TimeoutError:
            self.kill()

    def kill(self) -> None:
        """Kill the process. Does nothing if it has ended."""
        if self.process.returncode is None:
            self.process.kill()

    async def _records(self) -> AsyncIterator[FromEngine]:
        """Yield all records from the engine, until it closes its end of the socket."""
        while True:
            for body in split(self._buffer):
                if len(body) > _LARGE_FRAME:
                    await asyncio.sleep(0)  # yield to other tasks
                yield decode_from_engine(body)
            try:
                data = await self._reader.read(1 << 18)
            except ConnectionError:
                return
            if not data:
                return
            self._buffer += data

    async def _exit_reason(self) -> str:
        try:
            code = await asyncio.wait_for(self.process.wait(), 5.0)
        except TimeoutError:
            return "it closed its socket"
        cause = " (a file of the model was cut off while it was read)" if code == -signal.SIGBUS else ""
        return f"{describe_exit(code)}{cause}"
