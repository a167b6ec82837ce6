"""StopRule: stop a load early, after too many errors or when the server falls behind."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from statistics import median

#: Overload is checked after this many seconds and this many times the median latency of the first responses.
_MIN_SECONDS, _MIN_LATENCIES = 5.0, 10
#: Minimum number of requests due in the second half of the elapsed time, and maximum fraction of them unfinished.
_MIN_DUE, _MAX_BEHIND = 30, 0.1
#: Number of first responses whose latency is taken as that of a server without a backlog.
_EARLY = 10


class StopRule:
    """Monitors a load and calls ``on_stop`` once when it must stop. ``reason`` is None until then.

    max_errors   number of failed requests at which to stop, or None for no limit.
    on_overload  stop when the server falls behind: in the second half of the elapsed time, significantly fewer requests
                 finished than became due (by 10 %, and by three standard deviations of a Poisson process).
    """

    def __init__(self, max_errors: int | None = None, on_overload: bool = False) -> None:
        self.max_errors = max_errors
        self.on_overload = on_overload
        self.on_stop: Callable[[], None] = lambda: None
        self.reason: str | None = None
        self._due: list[float] = []
        self._ended: list[float] = []
        self._early: list[float] = []
        self._errors = 0

    def due(self, moment: float) -> None:
        """Record that a request became due ``moment`` seconds after the start. Moments must not decrease."""
        self._due.append(moment)
        self._check_overload(moment)

    def ended(self, moment: float, latency: float, failed: bool) -> None:
        """Record that a request finished, ``latency`` seconds after it was sent."""
        self._ended.append(moment)
        self._errors += failed
        if len(self._early) < _EARLY and not failed:
            self._early.append(latency)
        if self.max_errors is not None and self._errors >= self.max_errors:
            self.stop(f"{self._errors} requests failed (--max-errors)")
        self._check_overload(moment)

    def stop(self, reason: str) -> None:
        """Stop the load for ``reason``, unless it has already been stopped."""
        if self.reason is None:
            self.reason = reason
            self.on_stop()

    def _check_overload(self, now: float) -> None:
        if not self.on_overload or self.reason is not None or len(self._early) < _EARLY:
            return
        if now < max(_MIN_SECONDS, _MIN_LATENCIES * median(self._early)):
            return
        due, ended = (len(times) - bisect.bisect_right(times, now / 2) for times in (self._due, self._ended))
        behind = due - ended
        if due >= _MIN_DUE and behind > max(_MAX_BEHIND * due, 3 * math.sqrt(due)):
            self.stop(
                f"the server fell behind: {due} requests were due between {now / 2:.1f} and {now:.1f} s, {ended} "
                "finished (--stop-on-overload)"
            )
