"""Summary statistics of samples (mean, percentiles) for tables, records and gates."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Percentiles in every summary.
PERCENTILES = (50, 90, 95, 99)

#: Keys of a record's environment that identify the machine for comparisons of timings.
MACHINE = ("device", "device_name", "cpu_count", "threads")

#: Statistic -> value. None means not measured.
Summary = dict[str, float | None]


def percentile(ordered: Sequence[float], rank: float) -> float:
    """Return the ``rank``-th percentile of ``ordered`` (ascending, not empty), interpolated linearly as in numpy."""
    position = (len(ordered) - 1) * rank / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean of positive values, or None if there are none."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def summarize(values: Sequence[float]) -> Summary:
    """Return the mean, median, population standard deviation, minimum, maximum and PERCENTILES of ``values``.

    All keys are always present, with None if ``values`` is empty.
    """
    names = ["mean", "median", "std", "min", "max", *(f"p{rank}" for rank in PERCENTILES)]
    if not values:
        return dict.fromkeys(names)
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
    summary: Summary = {
        "mean": mean,
        "median": percentile(ordered, 50),
        "std": deviation,
        "min": ordered[0],
        "max": ordered[-1],
    }
    summary.update({f"p{rank}": percentile(ordered, rank) for rank in PERCENTILES})
    return summary


def milliseconds(name: str, seconds: Sequence[float]) -> dict[str, float | None | Summary]:
    """Return the statistics of one duration under two sets of keys: nested, for gates, and flat, as in vLLM.

    ``name`` ttft gives ``ttft_ms: {mean, p50, ...}`` and ``mean_ttft_ms``, ``p99_ttft_ms`` and so on.
    """
    summary = summarize([1000 * value for value in seconds])
    keys: dict[str, float | None | Summary] = {f"{name}_ms": summary}
    for statistic in ("mean", "median", "std", *(f"p{rank}" for rank in PERCENTILES)):
        keys[f"{statistic}_{name}_ms"] = summary[statistic]
    return keys


def rate(amount: float, seconds: float) -> float | None:
    """Return ``amount`` per second, or None if ``seconds`` is 0."""
    return amount / seconds if seconds > 0 else None
