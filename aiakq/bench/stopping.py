"""StopRule: ends a load before its time, after too many errors or when the server falls behind."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from statistics import median

#: Overload is looked for after so many seconds, which are also at least so many times an early answer took.
_MIN_SECONDS, _MIN_ANSWERS = 5.0, 10
#: Requests that must have been due in the second half of the time, and the share of them without an answer.
_MIN_DUE, _MAX_BEHIND = 30, 0.1
#: How many of the first answers say how long one takes while the server is not behind.
_EARLY = 10


class StopRule:
    """Watches a load and calls ``on_stop`` once, when it has to end. ``reason`` is None until then.

    max_errors   requests that may fail before the load ends; None: any number.
    on_overload  whether it ends when the server falls behind: in the second half of the time so far, clearly fewer
                 requests ended than became due (by 10 %, and by three standard deviations of a Poisson process).
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
        """A request became due. Moments are seconds since the load began, and do not decrease."""
        self._due.append(moment)
        self._look(moment)

    def ended(self, moment: float, latency: float, failed: bool) -> None:
        """A request that took ``latency`` seconds ended."""
        self._ended.append(moment)
        self._errors += failed
        if len(self._early) < _EARLY and not failed:
            self._early.append(latency)
        if self.max_errors is not None and self._errors >= self.max_errors:
            self.stop(f"{self._errors} requests failed (--max-errors)")
        self._look(moment)

    def stop(self, reason: str) -> None:
        """End the load, unless it has ended already."""
        if self.reason is None:
            self.reason = reason
            self.on_stop()

    def _look(self, now: float) -> None:
        if not self.on_overload or self.reason is not None or len(self._early) < _EARLY:
            return
        if now < max(_MIN_SECONDS, _MIN_ANSWERS * median(self._early)):
            return
        due, ended = (len(times) - bisect.bisect_right(times, now / 2) for times in (self._due, self._ended))
        behind = due - ended
        if due >= _MIN_DUE and behind > max(_MAX_BEHIND * due, 3 * math.sqrt(due)):
            self.stop(
                f"the server fell behind: {due} requests were due between {now / 2:.1f} and {now:.1f} s, {ended} ended "
                "(--stop-on-overload)"
            )
