"""Supervisor: starts the engine process, and restarts it if it exits or hangs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from aiakq.arguments.server import ServerArguments
from aiakq.errors import AiakqError, error
from aiakq.formats.model_folder import some_of
from aiakq.server.process.engine_client import EngineClient
from aiakq.server.process.ipc import AdapterChecked, Configured, Loading, Ready, Started
from aiakq.server.process.request_manager import RequestManager
from aiakq.server.telemetry.events import OnEvent, ServerEvent, phase_event

logger = logging.getLogger("aiakq.server")

#: Time window in seconds of the limit on restarts. There is a pause before each restart except the first.
RESTART_WINDOW_SECONDS = 600.0
_PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0)


class LoadingProgress:
    """Progress of loading, for /ready."""

    def __init__(self) -> None:
        self._start_time = time.monotonic()
        self.phases: list[str] = []

    def as_dict(self) -> dict[str, object]:
        return {"seconds": round(time.monotonic() - self._start_time, 1), "done": list(self.phases)}


class Supervisor:
    """The engine of one server, across restarts of its process.

    engine    the current engine process.
    progress  progress of loading it.
    closing   set at shutdown, so that an engine that ends is not restarted.
    on_engine_end  called when an engine has ended.
    """

    engine: EngineClient

    def __init__(
        self,
        args: ServerArguments,
        on_event: OnEvent,
        replica: int | None = None,
        cpus: Sequence[int] = (),
        threads: int | None = None,
    ) -> None:
        """replica: index of the replica, if there are several. cpus, threads: see EngineClient.start."""
        self.progress = LoadingProgress()
        self.on_engine_end: Callable[[], None] = lambda: None
        self._replica = replica
        self._placement: tuple[Sequence[int], int | None] = (cpus, threads)
        self.closing = False
        self._args = args
        self._on_event = on_event
        self._restart_times: deque[float] = deque()
        self._last_active = 0.0  # when the last step ended, or the engine had no work
        self._has_stepped = False
        self._timeout_error: AiakqError | None = None
        self._files: Mapping[str, tuple[int, ...]] | None = None  # identity of the model's files at the first load

    async def start(self) -> None:
        """Start a process. Raises ``engine_start`` if that fails."""
        self.progress = LoadingProgress()
        self.engine = await EngineClient.start(self._args, *self._placement, self._replica or 0)

    async def load(
        self, on_configured: Callable[[Configured], None] = lambda configured: None, *, report: bool = True
    ) -> Ready:
        """Wait until the process is ready.

        Raises its error if it fails to load, ``served_model_changed`` if the model differs from the one first loaded.
        """
        progress = self.progress

        def on_files(configured: Configured) -> None:
            self._check_files(configured)
            on_configured(configured)

        def on_phase(phase: Loading) -> None:
            progress.phases.append(phase.name)
            if report:
                self._on_event(phase_event(phase.name, phase.seconds, phase.detail))

        return await self.engine.load(on_files, on_phase)

    def _check_files(self, configured: Configured) -> None:
        """Raise ``served_model_changed`` if the files have changed since the first load."""
        if self._files is None:
            self._files = configured.files
        names = sorted({*self._files, *configured.files})
        changed = [name for name in names if self._files.get(name) != configured.files.get(name)]
        if changed:
            raise error("served_model_changed", path=configured.model, files=some_of(changed))

    async def run(self, manager: RequestManager, ready: Ready) -> AiakqError:
        """Serve ``manager`` with the loaded engine and its successors. Returns the error that ended the last one."""
        while True:
            manager.on_engine_ready(self.engine.send, ready.limits)
            failure = await self._follow(manager)
            end_time = time.monotonic()
            self._on_event(ServerEvent("engine_dead", self._named(str(failure))))
            while True:
                restart = self._may_restart(end_time)
                _notify(manager, failure, restart)
                self.on_engine_end()
                if not restart:
                    self.engine.kill()
                    return failure
                try:
                    ready = await self._restart()
                except AiakqError as load_failure:
                    failure = load_failure
                    self.engine.kill()
                    self._on_event(ServerEvent("engine_dead", self._named(str(failure))))
                else:
                    break
            seconds = time.monotonic() - end_time
            text = self._named(f"The engine is ready again after {seconds:.1f} s.")
            self._on_event(ServerEvent("engine_ready", text, seconds=seconds, engine_pid=self.engine.pid))

    def _named(self, text: str) -> str:
        """Prefix a message with the replica, if there are several."""
        return text if self._replica is None else f"Replica {self._replica}: {text}"

    def _may_restart(self, now: float) -> bool:
        while self._restart_times and now - self._restart_times[0] > RESTART_WINDOW_SECONDS:
            self._restart_times.popleft()
        return not self.closing and len(self._restart_times) < self._args.max_engine_restarts

    async def _restart(self) -> Ready:
        pause = _PAUSES[min(len(self._restart_times), len(_PAUSES) - 1)]
        self._restart_times.append(time.monotonic())
        await asyncio.sleep(pause)
        await self.engine.stop(timeout=0)
        await self.start()
        return await self.load(report=False)

    async def _follow(self, manager: RequestManager) -> AiakqError:
        """Forward the engine's output until it ends; return the error it ended with."""
        self._last_active, self._has_stepped, self._timeout_error = time.monotonic(), False, None
        watchdog = asyncio.create_task(self._watch(manager))
        try:
            async for output in self.engine.steps():
                self._last_active = time.monotonic()
                if isinstance(output, Started):
                    manager.on_start(output.request_ids)
                    continue
                if isinstance(output, AdapterChecked):
                    manager.adapters.on_checked(output)
                    continue
                self._has_stepped |= output.stats.num_scheduled_tokens > 0
                manager.on_step(output)
            raise AssertionError("an engine ends with an error")
        except AiakqError as failure:
            return self._timeout_error or failure
        except Exception:
            logger.exception("following the engine failed")
            self.engine.kill()
            return error("engine_dead", reason="its messages could not be read")
        finally:
            watchdog.cancel()

    async def _watch(self, manager: RequestManager) -> None:
        """Abort the engine when it has work but finishes no step within the step timeout."""
        timeouts = {False: self._args.first_step_timeout, True: self._args.step_timeout}
        interval = min(1.0, *(timeout / 4 for timeout in timeouts.values()))
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(interval)
            now = time.monotonic()
            # If the sleep took much longer than requested, this process itself was suspended.
            if not manager.num_unfinished or now - slept_at > interval + 1.0:
                self._last_active = now
            timeout = timeouts[self._has_stepped]
            if now - self._last_active > timeout:
                self._timeout_error = error("engine_timeout", limit=timeout)
                await self.engine.abort()
                return


def _notify(manager: RequestManager, failure: AiakqError, restart: bool) -> None:
    """Notify ``manager`` that the engine has ended with ``failure``."""
    reason = failure.message.rstrip(".")
    if failure.id in ("engine_dead", "engine_start"):
        reason = failure.fields["reason"]
    if restart:
        running_error = failure if failure.id == "engine_timeout" else error("engine_restarted", reason=reason)
        manager.on_engine_end(running_error, error("engine_restarting", reason=reason), replay=True)
    else:
        dead = error("engine_dead", reason=reason)
        manager.on_engine_end(dead, dead, replay=False)
