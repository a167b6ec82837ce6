"""The first tables of docs/quality.md: our default beside the best of other tools, and what each setting adds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import fidelity_table
import figures
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


def compared(
    rows: Sequence[Row], by_model: Mapping[str, Results], titles: Mapping[str, str], pairs: Mapping[str, Result]
) -> list[str]:
    """Return the table of defaults and best others, and a sentence with the count of rows that are ahead.

    ``pairs`` are the comparisons of an earlier page (``published.pairs``), for rows whose values per window are lost.
    """
    lines = [
        "| model | kind | aiakq | KL | best other tool | its KL | ratio | perplexity | CPU s | its CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    total, ahead, sure = 0, 0, 0
    for key, found in by_model.items():
        for kind, ours, others in kinds(rows, found):
            best = min(others, key=lambda row: figures.kl(found[row.slug]))
            lowest = min(others, key=lambda row: figures.loss(found[row.slug]))
            one, other = found[ours.slug], found[best.slug]
            ratio, perplexity, certain = comparison(one, other, found[lowest.slug], pairs.get(f"{key}, {kind}"))
            total += 1
            if figures.kl(one) < figures.kl(other):
                ahead, sure = ahead + 1, sure + certain
            lines.append(
                f"| {titles.get(key, key)} | {kind} | {ours.name}{figures.mark(one)} | {figures.kl(one):.5f} | "
                f"{best.tool}, {best.name}{figures.mark(other)} | {figures.kl(other):.5f} | {ratio} | {perplexity} | "
                f"{one['processor_seconds']:.0f} | {other['processor_seconds']:.0f} |"
            )
    if not total:
        return []
    return [
        COMPARED,
        "",
        *lines,
        "",
        f"Our default has the lower divergence in {ahead} of {total} rows, in {sure} of them with an interval "
        "that excludes no difference.",
    ]


def comparison(one: Result, other: Result, lowest: Result, known: Result | None) -> tuple[str, str, bool]:
    """Return ratio, perplexity and whether the interval excludes no difference, of our row and the best others."""
    perplexity = figures.against(one, lowest) if not figures.is_published(one) else ""
    if figures.pairable(one, other):
        ratio, interval, difference = fidelity_table.paired(one["kl"], other["kl"])
        within = "" if interval is None else f" ({interval.low:.2f} to {interval.high:.2f})"
        return f"{ratio:.2f}{within}", perplexity, difference is not None and difference.high < 0
    if known is not None and known["kl"] == [f"{figures.kl(one):.5f}", f"{figures.kl(other):.5f}"]:
        return known["ratio"], known["perplexity"], known["sure"]
    return f"{figures.kl(one) / figures.kl(other):.2f}", perplexity, False


def kinds(rows: Sequence[Row], found: Results) -> Iterator[tuple[str, Row, list[Row]]]:
    """Yield each kind that was measured with our default and another tool on the same model."""
    for kind in dict.fromkeys(row.kind for row in rows):
        measured = [row for row in rows if row.kind == kind and figures.is_scored(found.get(row.slug, {}))]
        ours, others = default_of(measured), [row for row in measured if row.tool != "aiakq"]
        if ours is not None:
            others = [row for row in others if figures.same_original(found[row.slug], found[ours.slug])]
        if ours is not None and others:
            yield kind, ours, others


def default_of(rows: Sequence[Row]) -> Row | None:
    """Our row that others of the kind are compared with: the first that does more than round."""
    return next((row for row in rows if row.tool == "aiakq" and not row.request.get("plain")), None)


def settings(rows: Sequence[Row], by_model: Mapping[str, Results], titles: Mapping[str, str]) -> list[str]:
    """Return the table of our settings of gptq, a column for each model and width where they were measured."""
    names = ["RTN", "gptq", *GPTQ_SETTINGS]
    columns: dict[str, dict[str, str]] = {}
    for key, found in by_model.items():
        for bits in (4, 3, 2):
            ours = [row for row in rows if row.kind == kind_of(bits, True) and row.tool == "aiakq"]
            scored = {row.name: found[row.slug] for row in ours if figures.is_scored(found.get(row.slug, {}))}
            if scored.keys() & GPTQ_SETTINGS.keys() and "gptq" in scored:
                same = {name: row for name, row in scored.items() if figures.same_original(row, scored["gptq"])}
                columns[f"{titles.get(key, key)}, {bits} bits"] = {
                    name: f"{figures.kl(row):.5f}{figures.mark(row)}" for name, row in same.items()
                }
    if not columns:
        return []
    lines = [f"| settings | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name in names:
        cells = [shown.get(name, "") for shown in columns.values()]
        if not any(cells):
            continue
        shown = f"**{name}**" if name == "gptq" else name
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return [SETTINGS, "", *lines]
