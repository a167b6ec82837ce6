"""What a run of load_generator.py found."""

from __future__ import annotations

import collections
import itertools
import statistics
import sys
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Findings:
    """What a run found.

    failures        messages of failed checks.
    retries         number by error code.
    misbehaved      number of requests by kind of misbehaviour.
    num_good        requests of well-behaved clients.
    num_answered    requests whose response was compared with the expected one.
    min_received    requests that the server must have counted; it may have counted ``maybe_received`` more.
    min_succeeded   requests that the server must have counted as successful; ``maybe_succeeded`` likewise.
    recovery        seconds from each kill of an engine until an engine was ready.
    memory          (requests so far, megabytes of the server, megabytes of the engine).
    """

    failures: list[str] = field(default_factory=list, repr=False)
    retries: collections.Counter[str] = field(default_factory=collections.Counter)
    misbehaved: collections.Counter[str] = field(default_factory=collections.Counter)
    ids: set[str] = field(default_factory=set, repr=False)
    num_good: int = 0
    num_answered: int = 0
    min_received: int = 0
    maybe_received: int = 0
    min_succeeded: int = 0
    maybe_succeeded: int = 0
    recovery: list[float] = field(default_factory=list, repr=False)
    memory: list[tuple[int, float, float]] = field(default_factory=list, repr=False)

    def fail(self, line: str) -> None:
        self.failures.append(line)
        if len(self.failures) <= 50:
            print(line, file=sys.stderr, flush=True)

    def growth(self, engine: bool = False) -> float:
        """Return megabytes per ten thousand requests: the median slope of all pairs of measurements (Theil-Sen)."""
        samples = [(done, memory[engine]) for done, *memory in self.memory]
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(samples, 2) if b[0] > a[0]]
        return 10_000 * statistics.median(slopes) if slopes else 0.0

    def report(self, seconds: float) -> dict[str, Any]:
        """Return the results that are printed as JSON."""
        return {
            "requests": self.num_good + self.misbehaved.total(),
            "seconds": round(seconds, 1),
            "answered": self.num_answered,
            "sent_again": dict(self.retries),
            "misbehaved": dict(self.misbehaved),
            "kills": len(self.recovery),
            "recovery_s": self.recovery,
            "growth_mb_per_10k": {"server": round(self.growth(), 2), "engine": round(self.growth(engine=True), 2)},
            "memory_mb": self.memory,
            "broken": len(self.failures),
            "first_broken": self.failures[:20],
        }
