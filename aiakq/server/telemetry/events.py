"""What a server tells the one who started it: one flat record per event, rendered by the command line.

Standard library only, so that the command line can import it before anything heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "listening", "phase", "ready", "warning", "stats", "log", "draining", "engine_dead", "engine_ready", "stopped"
]


@dataclass(frozen=True)
class ServerEvent:
    """One piece of news. ``message`` is always a complete line; the other fields are for tables.

    listening    the port is bound, loading begins; url.
    phase        one phase of loading ended; name, seconds, detail.
    ready        requests are answered from now on; url, curl, facts, seconds since the start, engine_pid.
    warning      something the operator should know; nothing failed.
    stats        the line of statistics every ten seconds while requests run.
    log          a line of the HTTP server's or our own log; detail is the level, like "warning".
    draining     a signal came; running requests are finished, new ones refused.
    engine_dead  the engine process ended by itself, or hung and was ended; requests are refused until engine_ready.
    engine_ready it is; seconds since it ended, engine_pid.
    stopped      the server ended in order.
    """

    kind: EventKind
    message: str
    name: str = ""
    seconds: float | None = None
    detail: str = ""
    url: str = ""
    curl: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    engine_pid: int | None = None


OnEvent = Callable[[ServerEvent], None]
