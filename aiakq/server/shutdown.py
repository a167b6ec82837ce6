"""The end of a server: signals, and draining of running requests."""

from __future__ import annotations

import asyncio
import signal
import time

from aiakq.arguments.server import ServerArguments
from aiakq.errors import WORKER, AiakqError, error
from aiakq.server.api.service import ServerState
from aiakq.server.http.body_budget import BodyBudget
from aiakq.server.http.http_server import FLUSH_SECONDS
from aiakq.server.periodic import expire_requests, release_memory, report_stats, trim_memory
from aiakq.server.process.replicas import Supervisors
from aiakq.server.telemetry.events import OnEvent, ServerEvent


class Signals:
    """Context manager that records SIGINT and SIGTERM in ``received`` on the event loop."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._first = asyncio.Event()

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, int(number))
        return self

    def __exit__(self, *ignored: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    async def wait_or(self, *tasks: asyncio.Task[object]) -> bool:
        """Wait for the first signal or for one of ``tasks``. Returns whether a task has finished."""
        first = asyncio.create_task(self._first.wait())
        await asyncio.wait({*tasks, first}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        return any(task.done() for task in tasks)

    def _on_signal(self, number: int) -> None:
        self.received.append(number)
        self._first.set()


async def drain(state: ServerState, timeout: float, signals: Signals, on_event: OnEvent) -> bool:
    """Reject new requests and wait for running ones. Returns whether a second signal interrupted the wait."""
    state.closing = error("shutting_down")
    running = state.num_in_flight
    text = f"Shutting down: {running} running requests are finished first, for at most {timeout:g} s."
    on_event(ServerEvent("draining", text if running else "Shutting down."))
    deadline = time.monotonic() + timeout
    while state.num_in_flight and len(signals.received) < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    interrupted = state.num_in_flight > 0 and len(signals.received) > 1
    num_cut = state.num_in_flight
    state.manager.fail_all(state.closing)
    deadline = time.monotonic() + FLUSH_SECONDS
    while state.num_in_flight and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    on_event(ServerEvent("stopped", f"Stopped; {num_cut} requests were cut short." if num_cut else "Stopped."))
    return interrupted


async def serve_until_end(
    state: ServerState,
    supervisors: Supervisors,
    engine: asyncio.Task[AiakqError],
    args: ServerArguments,
    signals: Signals,
    server_task: asyncio.Task[None],
    on_event: OnEvent,
    budget: BodyBudget,
) -> int:
    """Serve until a signal arrives and running requests are finished, or no engine is left. Returns the exit code."""
    tasks = [
        asyncio.create_task(expire_requests(state.manager)),
        asyncio.create_task(release_memory(state, budget)),
        asyncio.create_task(trim_memory()),
    ]
    if not args.disable_log_stats:
        tasks.append(asyncio.create_task(report_stats(state, on_event)))
    try:
        await signals.wait_or(server_task, engine)
        if server_task.done():  # ends only with an exception; raise it
            server_task.result()
        supervisors.closing = True
        timeout = 0 if engine.done() else args.shutdown_timeout
        interrupted = await drain(state, timeout, signals, on_event)
        if engine.done():
            engine.result()  # raise a bug in the supervisor
            return WORKER
        return 128 + signals.received[-1] if interrupted else 0
    finally:
        for task in (*tasks, engine):
            task.cancel()
        await state.stop(FLUSH_SECONDS)
