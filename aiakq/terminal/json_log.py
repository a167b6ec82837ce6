"""The log of ``aiakq serve`` as JSON, one object per line (``--log-format json``)."""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any

from aiakq.errors import AiakqError
from aiakq.terminal import console

if TYPE_CHECKING:
    from aiakq.server.telemetry.events import ServerEvent

#: Log levels of events; lines of a library's log have their own.
_LEVELS = {"warning": "warning", "engine_dead": "error"}


class JsonLog:
    """Writes server events to stderr."""

    def failure(self, problem: AiakqError) -> int:
        """Write the error that ended the command; return its exit code."""
        self._write("error", "failed", problem.message, {"error": problem.id, "remedy": problem.remedy})
        return problem.exit_code

    def event(self, event: ServerEvent) -> None:
        """Write one event. May be called from any thread."""
        level = event.detail if event.kind == "log" else _LEVELS.get(event.kind, "info")
        fields: dict[str, object] = {"name": event.name, "seconds": event.seconds, "url": event.url}
        if event.kind == "phase":
            fields["detail"] = event.detail
        self._write(level, event.kind, event.message, {**fields, "facts": event.facts, **event.values})

    @staticmethod
    def _write(level: str, event: str, message: str, fields: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        row = {"time": now.replace("+00:00", "Z"), "level": level, "event": event, "message": message}
        row |= {name: value for name, value in fields.items() if value not in (None, "", {}) and name not in row}
        console.write_log(json.dumps(row, separators=(",", ":"), default=str) + "\n")
