"""Terminal output of ``aiakq serve``: start-up table with times, the ready line, and the server's log."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import TYPE_CHECKING

from aiakq.terminal import console
from aiakq.terminal.console import facts, line, plain, seconds

if TYPE_CHECKING:
    from rich.status import Status

    from aiakq.server.telemetry.events import ServerEvent


class ServerLog:
    """Renders server events. Use as a context manager. On a terminal, a status line shows the progress of loading."""

    def __init__(self, model: str | None) -> None:
        self._model = model
        self._started = time.monotonic()
        self._phases: list[ServerEvent] = []
        self._status: Status | None = None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> ServerLog:
        if console.is_animated():
            self._status = self._open.enter_context(console.animated()).status(f"loading {plain(self._model or '')}")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exception: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_status()

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
            self._open.close()

    def event(self, event: ServerEvent) -> None:
        """Show one event. May be called from any thread."""
        if event.kind == "phase":
            self._phases.append(event)
            if self._status is not None:
                self._status.update(f"loading {plain(self._model or '')}: {plain(event.name)} done")
        elif event.kind == "ready":
            self._stop_status()
            self._startup(event)
        elif event.kind == "warning":
            console.warning(event.message)
        elif event.kind == "engine_dead":
            line(("aiakq: ", "bold"), ("error[engine_dead]", "bold red"), ": ", plain(event.message))
        elif event.kind in ("stats", "log"):
            line((plain(event.message), "dim"))
        elif event.kind != "listening":
            line(plain(event.message))

    def _startup(self, ready: ServerEvent) -> None:
        table = console.table("start-up", "time", "", left=(0, 2))
        for phase in self._phases:
            table.add_row(plain(phase.name), seconds(phase.seconds), plain(phase.detail))
        total = ready.seconds if ready.seconds is not None else time.monotonic() - self._started
        table.add_row("all", seconds(total), "", style="bold")
        console.show(table)
        facts("serving", dict(ready.facts))
        line("")
        line(("ready", "bold green"), " at ", (ready.url, "bold"))
        if ready.page:
            line("playground ", (ready.page, "bold"))
        line(ready.curl)
