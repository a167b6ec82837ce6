"""ServerEvent: flat records that a server reports, rendered by the command line.

Standard library only, so that the command line can import it before anything heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "listening",
    "phase",
    "ready",
    "warning",
    "stats",
    "log",
    "request",
    "draining",
    "engine_dead",
    "engine_ready",
    "stopped",
]


@dataclass(frozen=True)
class ServerEvent:
    """One event. ``message`` is always a complete line; the other fields are for tables.

    listening     the port is bound and loading begins; url.
    phase         one phase of loading has finished; name, seconds, detail.
    ready         the server answers requests; url, curl, page (the playground), facts, seconds since the start,
                  engine_pid.
    warning       something the operator should know; nothing has failed.
    stats         statistics, every ten seconds while requests are running.
    log           a line of the server's own log; detail is the level, such as "warning".
    request       a request to generate has ended, with --log-format json; values.
    draining      a signal was received: running requests are finished, new ones refused.
    engine_dead   the engine process ended by itself, or hung and was killed; requests are refused until engine_ready.
    engine_ready  an engine is running again; seconds since the last one ended, engine_pid.
    stopped       the server has shut down.
    """

    kind: EventKind
    message: str
    name: str = ""
    seconds: float | None = None
    detail: str = ""
    url: str = ""
    curl: str = ""
    page: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    engine_pid: int | None = None


OnEvent = Callable[[ServerEvent], None]


def phase_event(name: str, seconds: float, detail: str) -> ServerEvent:
    """The event for one finished phase of loading."""
    return ServerEvent("phase", f"{name}: {seconds:.1f} s, {detail}", name=name, seconds=seconds, detail=detail)
