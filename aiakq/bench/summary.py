"""Statistics of samples (mean, percentiles), for tables, records and gates; and what timings depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: The percentiles every summary holds.
PERCENTILES = (50, 90, 95, 99)

#: What a timing depends on, of the environment of a record.
MACHINE = ("device", "device_name", "cpu_count", "threads")

#: None means that nothing was measured; it is never written as zero.
Summary = dict[str, float | None]


def percentile(ordered: Sequence[float], rank: float) -> float:
    """The value below which ``rank`` percent of ``ordered`` (ascending, not empty) lies.

    Between two values it is interpolated linearly, as numpy's default does.
    """
    position = (len(ordered) - 1) * rank / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def geometric_mean(values: Sequence[float]) -> float | None:
    """Of values above 0; None of none."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def summarize(values: Sequence[float]) -> Summary:
    """Mean, median, standard deviation (of the population), smallest, largest and PERCENTILES of ``values``.

    The same keys always; every value is None when ``values`` is empty.
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
    """The keys that describe one duration: nested for gates, flat as vLLM's benchmark writes them.

    ``name`` ttft gives ``ttft_ms: {mean, p50, ...}`` and ``mean_ttft_ms``, ``p99_ttft_ms`` and so on.
    """
    summary = summarize([1000 * value for value in seconds])
    keys: dict[str, float | None | Summary] = {f"{name}_ms": summary}
    for statistic in ("mean", "median", "std", *(f"p{rank}" for rank in PERCENTILES)):
        keys[f"{statistic}_{name}_ms"] = summary[statistic]
    return keys


def rate(amount: float, seconds: float) -> float | None:
    """``amount`` per second; None when no time passed, because nothing ran."""
    return amount / seconds if seconds > 0 else None
