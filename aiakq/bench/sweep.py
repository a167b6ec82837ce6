"""``bench sweep``: measure a server at increasing load, up to saturation or to the highest rate within limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from aiakq.arguments.bench import SweepArguments
from aiakq.bench import serve
from aiakq.bench.serve import ServeOptions, limits_of
from aiakq.errors import error
from aiakq.records import Record

#: Concurrency of the saturated level without --max-concurrency.
SATURATED = 64
#: Maximum number of levels of a search.
MAX_LEVELS = 20
#: Metrics of each level's record that the sweep's record keeps.
_KEPT = (
    *("completed", "failed", "first_error", "duration", "request_throughput", "output_throughput"),
    *("total_token_throughput", "request_goodput", "goodput_share", "max_concurrent_requests", "ttft_ms", "tpot_ms"),
    *("itl_ms", "e2el_ms", "scheduled_e2el_ms", "queue_ms", "prefix_cache", "client_lag_ms", "stopped", "detailed"),
)

#: Progress callback: levels completed, total (or maximum) number of levels, name of the next level.
Progress = Callable[[int, int, str], None]


def run(options: ServeOptions, sweep: SweepArguments, progress: Progress) -> Record:
    """Measure every level. Raises ``usage``, ``option_conflict`` and the errors of ``serve.run``."""
    if options.num_prompts is not None or options.request_rate != math.inf:
        reason = "each level has its own rate and number of requests"
        given = "--request-rate" if options.num_prompts is None else "--num-prompts"
        hint = "Give --duration, the seconds per level."
        raise error("option_conflict", option=given, other="bench sweep", reason=reason, hint=hint)
    if sweep.search == "goodput" and not limits_of(options):
        raise error("usage", reason="A search needs limits.", hint="Example: --goodput ttft:200 --goodput tpot:50")
    levels = Levels(options, sweep, progress)
    found = levels.search() if sweep.search == "goodput" else levels.sweep()
    rows = [level for level in levels.rows if level["completed"]]
    fastest = max((row["output_throughput"] or 0.0 for row in rows), default=None)
    metrics = {
        "completed": sum(row["completed"] for row in levels.rows),
        "failed": sum(row["failed"] for row in levels.rows),
        "first_error": next((row["first_error"] for row in levels.rows if row["first_error"]), None),
        "max_output_throughput": fastest,
        "max_goodput_rate": found,
        "limits": limits_of(options),
        "levels": levels.rows,
    }
    assert levels.last is not None
    config = {**levels.last.config, **asdict(sweep), "duration_s": levels.seconds}
    return Record("sweep", levels.last.seed, config, metrics, levels.last.environment, tuple(levels.warnings))


def template() -> dict[str, Any]:
    """Return the document of an empty sweep, which has every key that a gate may name."""
    names = ("completed", "failed", "max_output_throughput", "max_goodput_rate")
    return Record("sweep", 0, {}, dict.fromkeys(names), {}).document()


class Levels:
    """Measures levels and keeps their results. ``last`` is the record of the latest level."""

    def __init__(self, options: ServeOptions, sweep: SweepArguments, progress: Progress) -> None:
        self.options, self.sweep_options, self.progress = options, sweep, progress
        self.seconds = options.duration_s or 10.0
        self.rows: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.last: Record | None = None

    def sweep(self) -> float | None:
        """Measure one request at a time, saturation, and evenly spaced rates between the two throughputs.

        Returns the highest of the rates that meets the limits, or None.
        """
        between = self.sweep_options.levels
        slow = self._closed("one at a time", 1, between + 2)
        fast = self._closed("saturated", self.options.max_concurrency or SATURATED, between + 2)
        low, high = slow["request_throughput"] or 0.0, fast["request_throughput"] or 0.0
        for number in range(1, between + 1):
            self._at(low + (high - low) * number / (between + 1), between + 2)
        if not limits_of(self.options):
            return None
        return max((row["request_rate"] for row in self.rows if row["request_rate"] and self.good(row)), default=None)

    def search(self) -> float | None:
        """Return the highest rate that meets the limits, or None: double it until it fails, then bisect."""
        start = self._closed("one at a time", 1, MAX_LEVELS)["request_throughput"]
        rate, best, worst = start or 1.0, 0.0, math.inf
        while len(self.rows) < MAX_LEVELS and worst / max(best, 1e-9) > 1 + self.sweep_options.precision / 100:
            if self.good(self._at(rate, MAX_LEVELS)):
                best = rate
                rate = 2 * rate if worst == math.inf else (best + worst) / 2
            else:
                worst = rate
                rate = rate / 2 if best == 0 else (best + worst) / 2
                if rate < (start or 1.0) / 64:
                    break
        return best or None

    def good(self, row: Mapping[str, Any]) -> bool:
        """Whether the server kept up with a level and enough requests met the limits; failed requests do not."""
        return row["stopped"] is None and (row["goodput_share"] or 0.0) >= self.sweep_options.goodput_share

    def _closed(self, name: str, concurrency: int, total: int) -> dict[str, Any]:
        options = replace(self.options, duration_s=self.seconds, max_concurrency=concurrency)
        return self._measure(name, options, None, total)

    def _at(self, rate: float, total: int) -> dict[str, object]:
        options = replace(self.options, duration_s=self.seconds, request_rate=rate)
        return self._measure(f"{rate:.3g} requests/s", options, rate, total)

    def _measure(self, name: str, options: ServeOptions, rate: float | None, total: int) -> dict[str, object]:
        self.progress(len(self.rows), total, name)
        # New prompts for each level, so that the prefix cache does not serve them.
        seed = None if options.seed is None else options.seed + len(self.rows)
        self.last = serve.run(replace(options, seed=seed), lambda *progress: None)
        row = {"level": name, "request_rate": rate, **{key: self.last.metrics.get(key) for key in _KEPT}}
        self.rows.append(row)
        self.warnings += [f"{name}: {text}" for text in self.last.warnings]
        return row
