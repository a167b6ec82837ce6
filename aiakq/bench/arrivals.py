"""When a benchmark sends its requests: constant, Poisson and bursty rates, and rates that rise."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Ramp:
    """A rate that goes from ``start`` to ``end`` requests per second, linearly or exponentially over the requests."""

    strategy: str
    start: float
    end: float

    def rate(self, share: float) -> float:
        """The rate when this ``share`` of the requests has been sent."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * share
        return self.start * (self.end / self.start) ** share


def arrival_times(
    count: int, per_second: float, burstiness: float, rng: random.Random, ramp: Ramp | None = None
) -> list[float]:
    """Seconds after the start at which each of ``count`` requests is sent; all 0 for an infinite rate.

    Gaps follow a gamma distribution of shape ``burstiness``: 1 is a Poisson process, less is burstier, more is
    steadier, infinity is constant. They are scaled so that the last request leaves at count / rate, the same for every
    seed; with a ramp when one without chance would leave.
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
