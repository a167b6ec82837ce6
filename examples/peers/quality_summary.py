"""The first tables of docs/quality.md: our default beside the best of other tools, and what each setting adds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fidelity
from rows import GPTQ_SETTINGS, Row, kind_of

Result = dict[str, Any]
#: Results by the slug of their row.
Results = Mapping[str, Result]

COMPARED = """\
The default of `aiakq quantize` beside the other tool with the lowest KL divergence of its kind, whatever its settings.
*Ratio*: our divergence to theirs, with the 95 % interval of paired resamples. *Perplexity*: ours relative to the other
tool with the lowest one (not always the same), with the standard error."""

SETTINGS = """\
KL divergence of `gptq` with one setting changed at a time; tuned: 96 steps of `--tune`. The default has original
targets, scales of either sign and the joint refit; *own targets* is the published algorithm with our scales."""


def compared(rows: Sequence[Row], by_model: Mapping[str, Results], titles: Mapping[str, str]) -> list[str]:
    """Return the table of defaults and best others, and a sentence with the count of rows that are ahead."""
    lines = [
        "| model | kind | aiakq | KL | best other tool | its KL | ratio | perplexity | CPU s | its CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    ahead, behind = [], []
    for key, found in by_model.items():
        for kind, ours, others in kinds(rows, found):
            best = min(others, key=lambda row: mean(found[row.slug]["kl"]))
            one, other = found[ours.slug], found[best.slug]
            ratio, interval, difference = fidelity.paired(one["kl"], other["kl"])
            within = "" if interval is None else f" ({interval.low:.2f} to {interval.high:.2f})"
            (ahead if ratio < 1 else behind).append(difference)
            lowest = min(others, key=lambda row: mean(found[row.slug]["loss"]))
            lines.append(
                f"| {titles.get(key, key)} | {kind} | {ours.name} | {mean(one['kl']):.5f} | {best.tool}, {best.name} | "
                f"{mean(other['kl']):.5f} | {ratio:.2f}{within} | {percent(one['loss'], found[lowest.slug]['loss'])} | "
                f"{one['processor_seconds']:.0f} | {other['processor_seconds']:.0f} |"
            )
    if not ahead and not behind:
        return []
    sure = sum(difference is not None and difference.high < 0 for difference in ahead)
    total = len(ahead) + len(behind)
    return [
        COMPARED,
        "",
        *lines,
        "",
        f"Our default has the lower divergence in {len(ahead)} of {total} rows, in {sure} of them with an interval "
        "that excludes no difference.",
    ]


def kinds(rows: Sequence[Row], found: Results) -> Iterator[tuple[str, Row, list[Row]]]:
    """Yield each kind that was measured with our default and another tool."""
    for kind in dict.fromkeys(row.kind for row in rows):
        measured = [row for row in rows if row.kind == kind and "kl" in found.get(row.slug, {})]
        ours, others = default_of(measured), [row for row in measured if row.tool != "aiakq"]
        if ours is not None and others:
            yield kind, ours, others


def default_of(rows: Sequence[Row]) -> Row | None:
    """Our row that others of the kind are compared with: the first that does more than round."""
    return next((row for row in rows if row.tool == "aiakq" and not row.request.get("plain")), None)


def settings(rows: Sequence[Row], by_model: Mapping[str, Results], titles: Mapping[str, str]) -> list[str]:
    """Return the table of our settings of gptq, a column for each model and width where they were measured."""
    names = ["RTN", "gptq", *GPTQ_SETTINGS]
    columns: dict[str, dict[str, float]] = {}
    for key, found in by_model.items():
        for bits in (4, 3, 2):
            ours = [row for row in rows if row.kind == kind_of(bits, True) and row.tool == "aiakq"]
            figures = {row.name: mean(found[row.slug]["kl"]) for row in ours if "kl" in found.get(row.slug, {})}
            if figures.keys() & GPTQ_SETTINGS.keys() and "gptq" in figures:
                columns[f"{titles.get(key, key)}, {bits} bits"] = figures
    if not columns:
        return []
    lines = [f"| settings | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name in names:
        cells = [figures.get(name) for figures in columns.values()]
        if all(kl is None for kl in cells):
            continue
        shown = f"**{name}**" if name == "gptq" else name
        lines.append(f"| {shown} | {' | '.join('' if kl is None else f'{kl:.5f}' for kl in cells)} |")
    return [SETTINGS, "", *lines]


def percent(loss: Sequence[float], reference: Sequence[float]) -> str:
    """How much larger perplexity is, in percent, with the standard error of the paired difference."""
    gaps = [a - b for a, b in zip(loss, reference, strict=True)]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return f"{100 * math.expm1(mean(gaps)):+.2f} ± {100 * error:.2f} %"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
