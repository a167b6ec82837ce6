"""``bench compare``: two results metric by metric, with confidence intervals, verdicts and an exit code for CI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from aiakq.arguments.comparison import CompareArguments
from aiakq.bench.comparison import statistics
from aiakq.bench.comparison.readers import DURATIONS, HIGHER_IS_BETTER, Result, read_side
from aiakq.bench.comparison.statistics import UNDECIDED, WORSE
from aiakq.errors import AiakqError, error
from aiakq.records import finite

#: The verdict on a counter whose value differs from the base.
CHANGED = "changed"
#: Settings in which two runs of the same benchmark may differ without a warning.
_FREE_SETTINGS = {"engine", "model", "model_id", "tokenizer_id", "backend", "save_detailed", "dataset", "vocab_size"}


class MetricRow(TypedDict):
    """A metric in a comparison. ``over`` and ``measurements`` are those of ``bench compare``."""

    metric: str
    higher_is_better: bool
    base: float
    new: float
    ratio: float
    low: float | None
    high: float | None
    verdict: str
    gated: bool
    over: NotRequired[str | None]
    measurements: NotRequired[list[int]]


class CounterRow(TypedDict):
    """A counter in a comparison."""

    counter: str
    base: int | None
    new: int | None
    verdict: str


class ComparedRows(TypedDict):
    """What verdicts depend on."""

    metrics: list[MetricRow]
    counters: list[CounterRow]


class ComparisonDocument(ComparedRows):
    """The document of a comparison."""

    kind: str
    base: str
    new: str
    margin: float
    confidence: float
    warnings: list[str]
    verdict: str


def run(options: CompareArguments) -> ComparisonDocument:
    """Compare two result files, or folders of them.

    Raises ``other_machine``, ``nothing_to_compare`` and the errors of ``read_side``.
    """
    return compare(read_side(Path(options.base)), read_side(Path(options.new)), options)


def compare(base: Result, new: Result, options: CompareArguments) -> ComparisonDocument:
    """Return the comparison as a JSON document, with every metric and counter that both results have."""
    warnings = _check_machines(base, new, options.across_machines)
    warnings += _differing_settings(base, new)
    common = [name for name in base.metrics if name in new.metrics]
    counters = [name for name in base.counters if name in new.counters]
    if not common and not counters:
        raise error("nothing_to_compare", base=base.label, new=new.label)
    estimates = {
        name: tuple(statistics.with_noise(side.metrics[name], options.noise / 100) for side in (base, new))
        for name in common
    }
    gated = _gated(estimates, options.metrics)
    rows = []
    for name, (before, after) in estimates.items():
        alpha = (1 - options.confidence / 100) / (len(gated) if name in gated else 1)
        interval = statistics.ratio(before, after, alpha)
        over = before.over if before.over == after.over else ""
        row = metric_row(name, before.value, after.value, interval, options.margin / 100, name in gated)
        row["over"], row["measurements"] = over or None, [before.count, after.count]
        rows.append(row)
    if any(row["gated"] and row["over"] == "requests" for row in rows) and options.noise == 0:
        warnings.append(
            "The intervals are computed from the requests of a single run and do not include the variation between "
            "runs: compare folders of several runs, give --noise, or use bench ab."
        )
    compared: ComparedRows = {"metrics": rows, "counters": counter_rows(base.counters, new.counters)}
    return {
        "kind": "comparison",
        "base": base.label,
        "new": new.label,
        "margin": options.margin / 100,
        "confidence": options.confidence / 100,
        **compared,
        "warnings": warnings,
        "verdict": verdict_of(compared),
    }


def metric_row(name: str, base: float, new: float, interval: statistics.Ratio, margin: float, gated: bool) -> MetricRow:
    """Return the row of one metric in the comparison document."""
    higher = name in HIGHER_IS_BETTER
    return {
        "metric": name,
        "higher_is_better": higher,
        "base": finite(base),
        "new": finite(new),
        "ratio": interval.value,
        "low": interval.low,
        "high": interval.high,
        "verdict": interval.verdict(margin, higher),
        "gated": gated,
    }


def counter_rows(base: Mapping[str, int], new: Mapping[str, int]) -> list[CounterRow]:
    """Return the rows of all counters of either side. A counter that one side lacks is new and no change."""
    names = dict.fromkeys([*base, *new])
    return [
        {
            "counter": name,
            "base": base.get(name),
            "new": new.get(name),
            "verdict": CHANGED if name in base and name in new and base[name] != new[name] else statistics.EQUAL,
        }
        for name in names
    ]


def verdict_of(document: ComparedRows) -> str:
    """Return the worst verdict among the gated metrics and the counters."""
    verdicts = [row["verdict"] for row in document["metrics"] if row["gated"]]
    verdicts += [row["verdict"] for row in document["counters"]]
    for verdict in (WORSE, CHANGED, UNDECIDED, statistics.NOT_WORSE, statistics.EQUAL):
        if verdict in verdicts:
            return verdict
    return statistics.BETTER


def failure(document: ComparisonDocument, allow_undecided: bool) -> AiakqError | None:
    """Return the error that the command exits with, or None if it succeeded.

    That is ``got_worse``, ``counters_changed`` or, without ``allow_undecided``, ``undecided``.
    """
    worse = [row for row in document["metrics"] if row["gated"] and row["verdict"] == WORSE]
    changed = [row for row in document["counters"] if row["verdict"] == CHANGED]
    undecided = [row for row in document["metrics"] if row["gated"] and row["verdict"] == UNDECIDED]
    if worse:
        return error("got_worse", percent=f"{100 * document['margin']:.3g}", metrics=listed(worse))
    if changed:
        each = ", ".join(f"{row['counter']} {row['base']} -> {row['new']}" for row in changed)
        return error("counters_changed", count=len(changed), counters=each)
    if undecided and not allow_undecided:
        return error("undecided", metrics=listed(undecided))
    return None


def listed(rows: Iterable[MetricRow]) -> str:
    """Return metrics with their changes as text for a message."""
    return ", ".join(f"{row['metric']} {change_text(row)}" for row in rows)


def change_text(row: MetricRow) -> str:
    """Return a change and its interval as text: ``+5.1 % (+3.9 to +6.2 %)``."""
    change = f"{percent(row['ratio'])} %"
    if row["low"] is None or row["high"] is None:
        return change
    return f"{change} ({percent(row['low'])} to {percent(row['high'])} %)"


def percent(ratio: float) -> str:
    """Format a ratio as a change in percent; ``>+900`` from a factor of ten on."""
    return f"{100 * (ratio - 1):+.1f}" if ratio < 10 else ">+900"


def _gated(estimates: Mapping[str, Sequence[statistics.Estimate]], chosen: Sequence[str]) -> list[str]:
    """Return the gated metrics: ``chosen``, or by default the median of each duration and the throughputs.

    The mean of a duration is taken if only the mean has an interval; a throughput only if it has one. Raises ``usage``
    for a chosen metric that one of the results lacks.
    """
    if chosen:
        for name in chosen:
            if name not in estimates:
                raise error(
                    "usage",
                    reason=f"The results do not both have the metric {name!r}.",
                    hint=f"Both have {', '.join(estimates) or 'none'}.",
                )
        return list(chosen)
    known = [name for name, sides in estimates.items() if all(side.error is not None for side in sides)]
    gated = []
    for duration in DURATIONS:
        choices = [name for name in (f"{duration}_ms.p50", f"{duration}_ms.mean") if name in estimates]
        if choices and duration not in ("itl", "queue"):
            gated.append(next((name for name in choices if name in known), choices[0]))
    return gated + [name for name in known if "_ms." not in name and name != "load_s"]


def _check_machines(base: Result, new: Result, across: bool) -> list[str]:
    """Return warnings about the machines. Raises ``other_machine`` if they differ and ``across`` is false."""
    if not base.metrics:
        return []  # counters do not depend on the machine
    differing = [
        f"{key} {base.machine[key]!r} and {new.machine[key]!r}"
        for key in base.machine
        if key in new.machine and base.machine[key] != new.machine[key]
    ]
    if differing and not across:
        remedy = "--across-machines compares them anyway"
        raise error("other_machine", differences="; ".join(differing), remedy=remedy)
    if differing:
        return [f"Measured on different machines: {'; '.join(differing)}."]
    unknown = [side.label for side in (base, new) if not side.machine]
    return [f"{name} does not name the machine it was measured on." for name in dict.fromkeys(unknown)]


def _differing_settings(base: Result, new: Result) -> list[str]:
    """Return a warning if the settings of the two benchmarks differ."""
    differing = [
        f"{key} {base.settings[key]} and {new.settings[key]}"
        for key in base.settings
        if key in new.settings and key not in _FREE_SETTINGS and base.settings[key] != new.settings[key]
    ]
    if base.kind != new.kind:
        differing.insert(0, f"kind {base.kind} and {new.kind}")
    return [f"The benchmark settings differ: {'; '.join(differing)}."] if differing else []
