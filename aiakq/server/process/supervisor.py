"""Keeps an engine running: starts its process, passes on what it says, and starts it again when it ends or hangs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from aiakq.errors import AiakqError, error
from aiakq.server.api.request_manager import GenerationTable
from aiakq.server.process.engine_client import EngineClient
from aiakq.server.process.ipc import Configured, Loading, Ready
from aiakq.server.telemetry.events import OnEvent, ServerEvent

logger = logging.getLogger("aiakq.server")

#: Restarts are counted over this many seconds; the pause before each after the first.
WINDOW = 600.0
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0)


class Progress:
    """How far loading is, for /ready."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.phases: list[str] = []

    def as_dict(self) -> dict[str, Any]:
        return {"seconds": round(time.monotonic() - self.began, 1), "done": list(self.phases)}


class Supervisor:
    """The engine of one server, whichever process it is in.

    engine    the process now.
    progress  of loading it.
    closing   set to leave an engine that ends where it is.
    """

    engine: EngineClient

    def __init__(self, args: Mapping[str, Any], on_event: OnEvent) -> None:
        self.progress = Progress()
        self.closing = False
        self._args = args
        self._on_event = on_event
        self._restarts: deque[float] = deque()
        self._last = 0.0  # when a step ended, or there was nothing to do
        self._has_stepped = False
        self._hung: AiakqError | None = None

    async def start(self) -> None:
        """Start a process. Raises ``engine_start`` if there is none to be had."""
        self.progress = Progress()
        self.engine = await EngineClient.start(self._args)

    async def load(
        self, on_configured: Callable[[Configured], None] = lambda settled: None, *, tell: bool = True
    ) -> Ready:
        """Wait until the process is ready. Raises what kept it from loading."""
        progress = self.progress

        def on_phase(phase: Loading) -> None:
            progress.phases.append(phase.name)
            if tell:
                self._on_event(phase_event(phase.name, phase.seconds, phase.detail))

        return await self.engine.load(on_configured, on_phase)

    async def run(self, table: GenerationTable, ready: Ready) -> AiakqError:
        """Serve ``table`` with the loaded engine and those after it. Returns why there is none any more."""
        while True:
            table.on_engine_ready(self.engine.send, ready.limits)
            failure = await self._follow(table)
            ended = time.monotonic()
            self._on_event(ServerEvent("engine_dead", str(failure)))
            while True:
                again = self._may_restart(ended)
                _tell(table, failure, again)
                if not again:
                    self.engine.kill()
                    return failure
                try:
                    ready = await self._restart()
                except AiakqError as reason:
                    failure = reason
                    self.engine.kill()
                    self._on_event(ServerEvent("engine_dead", str(failure)))
                else:
                    break
            seconds = time.monotonic() - ended
            text = f"The engine is ready again after {seconds:.1f} s."
            self._on_event(ServerEvent("engine_ready", text, seconds=seconds, engine_pid=self.engine.pid))

    def _may_restart(self, now: float) -> bool:
        while self._restarts and now - self._restarts[0] > WINDOW:
            self._restarts.popleft()
        return not self.closing and len(self._restarts) < self._args["max_engine_restarts"]

    async def _restart(self) -> Ready:
        pause = _PAUSES[min(len(self._restarts), len(_PAUSES) - 1)]
        self._restarts.append(time.monotonic())
        await asyncio.sleep(pause)
        await self.engine.stop(patience=0)
        await self.start()
        return await self.load(tell=False)

    async def _follow(self, table: GenerationTable) -> AiakqError:
        """Pass on what the engine says until it ends; returns how it did."""
        self._last, self._has_stepped, self._hung = time.monotonic(), False, None
        watch = asyncio.create_task(self._watch(table))
        try:
            async for output in self.engine.steps():
                self._last = time.monotonic()
                self._has_stepped |= output.stats.num_scheduled_tokens > 0
                table.on_step(output)
            raise AssertionError("an engine ends with an error")
        except AiakqError as failure:
            return self._hung or failure
        except Exception:
            logger.exception("following the engine failed")
            self.engine.kill()
            return error("engine_dead", reason="its messages could not be read")
        finally:
            watch.cancel()

    async def _watch(self, table: GenerationTable) -> None:
        """End the engine when it has work and finishes no step for too long."""
        times = {False: self._args["first_step_timeout"], True: self._args["step_timeout"]}
        pause = min(1.0, *(limit / 4 for limit in times.values()))
        while True:
            slept = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            if not table.busy or now - slept > pause + 1.0:  # or it is this process that was stopped
                self._last = now
            limit = times[self._has_stepped]
            if now - self._last > limit:
                self._hung = error("engine_timeout", limit=limit)
                await self.engine.abort()
                return


def _tell(table: GenerationTable, failure: AiakqError, again: bool) -> None:
    """Tell those who wait and those who come that the engine is gone."""
    reason = failure.fields.get("reason") or str(failure.message).rstrip(".")
    if again:
        told = failure if failure.id == "engine_timeout" else error("engine_restarted", reason=reason)
        table.on_engine_end(told, error("engine_restarting", reason=reason), replay=True)
    else:
        dead = error("engine_dead", reason=reason)
        table.on_engine_end(dead, dead, replay=False)


def phase_event(name: str, seconds: float, detail: str) -> ServerEvent:
    """One phase of loading, told."""
    return ServerEvent("phase", f"{name}: {seconds:.1f} s, {detail}", name=name, seconds=seconds, detail=detail)
