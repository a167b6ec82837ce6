"""``bench compare``: two results metric by metric, with intervals and verdicts; and what an outcome means for CI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiakq.arguments.comparison import CompareArguments
from aiakq.bench.comparison import statistics
from aiakq.bench.comparison.readers import DURATIONS, HIGHER_IS_BETTER, Result, read_side
from aiakq.bench.comparison.statistics import UNDECIDED, WORSE
from aiakq.errors import AiakqError, error
from aiakq.records import finite

#: The verdict about a counter that is not what it was.
CHANGED = "changed"
#: Settings in which two runs of the same benchmark may differ.
_FREE_SETTINGS = {"engine", "model", "model_id", "tokenizer_id", "backend", "save_detailed", "dataset", "vocab_size"}


def run(options: CompareArguments) -> dict[str, Any]:
    """Compare two files or folders of results. Raises ``other_machine``, ``nothing_to_compare``, and what reading them
    raises.
    """
    return compare(read_side(Path(options.base)), read_side(Path(options.new)), options)


def compare(base: Result, new: Result, options: CompareArguments) -> dict[str, Any]:
    """The document of a comparison: every metric and counter that both results have."""
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
        found = statistics.ratio(before, after, alpha)
        over = before.over if before.over == after.over else ""
        row = metric_row(name, before.value, after.value, found, options.margin / 100, name in gated)
        rows.append({**row, "over": over or None, "measurements": [before.count, after.count]})
    if any(row["gated"] and row["over"] == "requests" for row in rows) and options.noise == 0:
        warnings.append(
            "Intervals come from the requests of one run each and do not show how much runs differ: "
            "compare folders of several runs, give --noise, or use bench ab."
        )
    document = {
        "kind": "comparison",
        "base": base.label,
        "new": new.label,
        "margin": options.margin / 100,
        "confidence": options.confidence / 100,
        "metrics": rows,
        "counters": counter_rows(base.counters, new.counters),
        "warnings": warnings,
    }
    return {**document, "verdict": verdict_of(document)}


def metric_row(
    name: str, base: float, new: float, found: statistics.Ratio, margin: float, gated: bool
) -> dict[str, Any]:
    """One metric of a comparison, for JSON."""
    higher = name in HIGHER_IS_BETTER
    return {
        "metric": name,
        "higher_is_better": higher,
        "base": finite(base),
        "new": finite(new),
        "ratio": found.value,
        "low": found.low,
        "high": found.high,
        "verdict": found.verdict(margin, higher),
        "gated": gated,
    }


def counter_rows(base: Mapping[str, int], new: Mapping[str, int]) -> list[dict[str, Any]]:
    """Counters that at least one side has. One that only one side has is no change: code that counts it is newer."""
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


def verdict_of(document: Mapping[str, Any]) -> str:
    """The verdict on all gated metrics and all counters: the worst of them."""
    verdicts = [row["verdict"] for row in document["metrics"] if row["gated"]]
    verdicts += [row["verdict"] for row in document["counters"]]
    for bad in (WORSE, CHANGED, UNDECIDED, statistics.NOT_WORSE, statistics.EQUAL):
        if bad in verdicts:
            return bad
    return statistics.BETTER


def failure(document: Mapping[str, Any], allow_undecided: bool) -> AiakqError | None:
    """The error that ends the command: ``got_worse``, ``counters_changed`` or ``undecided``; None if it succeeded."""
    worse = [row for row in document["metrics"] if row["gated"] and row["verdict"] == WORSE]
    changed = [row for row in document["counters"] if row["verdict"] == CHANGED]
    open_ones = [row for row in document["metrics"] if row["gated"] and row["verdict"] == UNDECIDED]
    if worse:
        return error("got_worse", percent=f"{100 * document['margin']:.3g}", metrics=listed(worse))
    if changed:
        each = ", ".join(f"{row['counter']} {row['base']} -> {row['new']}" for row in changed)
        return error("counters_changed", count=len(changed), counters=each)
    if open_ones and not allow_undecided:
        return error("undecided", metrics=listed(open_ones))
    return None


def listed(rows: Iterable[Mapping[str, Any]]) -> str:
    """Metrics with their changes, for a message."""
    return ", ".join(f"{row['metric']} {change_text(row)}" for row in rows)


def change_text(row: Mapping[str, Any]) -> str:
    """A change with its interval: ``+5.1 % (+3.9 to +6.2 %)``."""
    change = f"{percent(row['ratio'])} %"
    if row["low"] is None:
        return change
    return f"{change} ({percent(row['low'])} to {percent(row['high'])} %)"


def percent(ratio: float) -> str:
    """A ratio as a change in percent; beyond a factor of ten only that it is beyond."""
    return f"{100 * (ratio - 1):+.1f}" if ratio < 10 else ">+900"


def _gated(estimates: Mapping[str, Sequence[statistics.Estimate]], chosen: Sequence[str]) -> list[str]:
    """The metrics that decide: those chosen; else of each duration the median, or the mean if only it has an interval;
    and throughput if it has one. Raises ``usage`` for a metric that is not there.
    """
    if chosen:
        for name in chosen:
            if name not in estimates:
                raise error(
                    "usage",
                    reason=f"Not both results have the metric {name!r}.",
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
    """Warnings about machines. Raises ``other_machine`` if they are known to differ and that was not allowed."""
    if not base.metrics:
        return []  # counters do not depend on it
    differing = [
        f"{key} {base.machine[key]!r} and {new.machine[key]!r}"
        for key in base.machine
        if key in new.machine and base.machine[key] != new.machine[key]
    ]
    if differing and not across:
        remedy = "--across-machines compares them all the same"
        raise error("other_machine", differences="; ".join(differing), remedy=remedy)
    if differing:
        return [f"Measured on different machines: {'; '.join(differing)}."]
    unknown = [side.label for side in (base, new) if not side.machine]
    return [f"{name} does not say on what machine it was measured." for name in dict.fromkeys(unknown)]


def _differing_settings(base: Result, new: Result) -> list[str]:
    """A warning about settings of the load that differ."""
    found = [
        f"{key} {base.settings[key]} and {new.settings[key]}"
        for key in base.settings
        if key in new.settings and key not in _FREE_SETTINGS and base.settings[key] != new.settings[key]
    ]
    if base.kind != new.kind:
        found.insert(0, f"kind {base.kind} and {new.kind}")
    return [f"The loads differ: {'; '.join(found)}."] if found else []
