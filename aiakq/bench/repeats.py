"""Merge repeated runs of a benchmark into one record: means over the runs, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import fmean, stdev
from typing import Any

from aiakq.bench.comparison.statistics import student_t
from aiakq.records import Record

#: Confidence of the intervals.
CONFIDENCE = 0.95
#: Keys that are summed over the runs; all other numbers are averaged.
_TOTALS = ("completed", "failed", "not_sent", "total_input_tokens", "total_output_tokens")
#: Keys without an interval: sums and settings.
_PLAIN = (*_TOTALS, "request_rate", "burstiness", "max_concurrency", "num_prompts")
#: Key of the per-request lists, which are concatenated over the runs.
_LISTS = "detailed"


def join(records: Sequence[Record]) -> Record:
    """Merge the records of several runs of one benchmark.

    Numbers are means over the runs; counts of requests and tokens are sums. ``intervals`` has the confidence interval
    of each mean (Student's t over the runs) under the same keys, ``runs`` the metrics of every run.
    """
    first = records[0]
    runs = [record.metrics for record in records]
    metrics = _merged(runs)
    metrics["intervals"] = _intervals(runs)
    metrics["runs"] = [{"seed": record.seed, **record.metrics} for record in records]
    metrics["first_error"] = next((run["first_error"] for run in runs if run.get("first_error")), None)
    if _LISTS in first.metrics:
        metrics[_LISTS] = {key: [x for run in runs for x in run[_LISTS][key]] for key in first.metrics[_LISTS]}
        for run in metrics["runs"]:
            del run[_LISTS]
    warnings = tuple(dict.fromkeys(text for record in records for text in record.warnings))
    config = {**first.config, "repeats": len(records)}
    return Record(first.kind, first.seed, config, metrics, first.environment, warnings, first.date)


def template(document: Mapping[str, object]) -> dict[str, object]:
    """Extend the template document of one run to that of several, which has every key of ``intervals``."""
    metrics = {key: value for key, value in document.items() if key not in ("schema_version", "seed")}
    return {**document, "intervals": _intervals([metrics, metrics])}


def _merged(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge metrics key by key: sums or means of numbers, None if a run lacks one; else the first run's value."""
    merged: dict[str, object] = {}
    for key, value in runs[0].items():
        values = [run.get(key) for run in runs]
        if key == _LISTS:
            continue
        if isinstance(value, Mapping):
            merged[key] = _merged([each if isinstance(each, Mapping) else {} for each in values])
        elif key == "acceptance_by_position":
            merged[key] = [fmean(shares) for shares in zip_longest(*(each or [] for each in values), fillvalue=0.0)]
        elif all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in values):
            numbers = [each for each in values if isinstance(each, (int, float))]
            merged[key] = sum(numbers) if key in _TOTALS else numbers[0] if key in _PLAIN else fmean(numbers)
        else:
            merged[key] = None if None in values and not isinstance(value, str) else value
    return merged


def _intervals(runs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return intervals like ``{"ttft_ms": {"p50": {"low": ..., "high": ...}}}``; None bounds if a run lacks a value."""
    intervals: dict[str, object] = {}
    for key, value in runs[0].items():
        values = [run.get(key) for run in runs]
        if isinstance(value, Mapping) and key != _LISTS:
            intervals[key] = _intervals([each if isinstance(each, Mapping) else {} for each in values])
        elif key not in _PLAIN and (value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))):
            intervals[key] = _interval(values)
    return intervals


def _interval(values: Sequence[object]) -> dict[str, float | None]:
    numbers = [value for value in values if isinstance(value, (int, float))]
    if len(numbers) < max(2, len(values)):
        return {"low": None, "high": None}
    half = student_t((1 + CONFIDENCE) / 2, len(numbers) - 1) * stdev(numbers) / math.sqrt(len(numbers))
    return {"low": fmean(numbers) - half, "high": fmean(numbers) + half}
