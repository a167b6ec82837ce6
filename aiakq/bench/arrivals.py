"""Arrival times of requests: constant, Poisson and bursty rates, and rates that ramp up."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Ramp:
    """A rate that goes from ``start`` to ``end`` requests per second over the run.

    strategy  "linear" or "exponential".
    """

    strategy: str
    start: float
    end: float

    def rate(self, fraction: float) -> float:
        """Return the rate, in requests per second, after this fraction (0 to 1) of the requests."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * fraction
        return self.start * math.pow(self.end / self.start, fraction)


def arrival_times(
    count: int, per_second: float, burstiness: float, rng: random.Random, ramp: Ramp | None = None
) -> list[float]:
    """Return the send time of each of ``count`` requests in seconds after the start; all 0 for an infinite rate.

    Gaps follow a gamma distribution of shape ``burstiness``: 1 is a Poisson process, lower is burstier, higher is
    steadier, infinity is a constant rate. They are rescaled so that the last request is sent at the expected time
    (``count / per_second`` without a ramp), whatever the seed.
    """
    if ramp is None and per_second == float("inf"):
        return [0.0] * count
    weights = [1 / (per_second if ramp is None else ramp.rate(index / max(1, count - 1))) for index in range(count)]
    gaps = weights if math.isinf(burstiness) else [rng.gammavariate(burstiness, 1.0) * weight for weight in weights]
    scale = sum(weights) / sum(gaps) if gaps else 1.0
    times, now = [], 0.0
    for gap in gaps:
        now += gap * scale
        times.append(now)
    return times
