"""Write comparisons for other tools: Markdown, JUnit XML, github-action-benchmark, Bencher."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from aiakq.arguments.comparison import ReportArguments
from aiakq.bench.comparison.compare import CHANGED, ComparisonDocument, MetricRow, change_text
from aiakq.bench.comparison.statistics import UNDECIDED, WORSE
from aiakq.errors import error

#: Verdict -> its Markdown.
_MARKS = {WORSE: "❌ worse", CHANGED: "❌ changed", UNDECIDED: "❔ undecided", "better": "✅ better"}
_UNITS = {
    "ms": "ms",
    "us": "us",
    "mb": "MB",
    "s": "s",
    "throughput": "1/s",
    "goodput": "1/s",
    "bytes": "B",
}


def check(options: ReportArguments) -> None:
    """Raise ``output_failed`` if the folder of a report does not exist. Call it before measuring."""
    for path in (options.output, options.markdown, options.junit, options.github, options.bencher):
        if path is not None and not path.absolute().parent.is_dir():
            raise error("output_failed", path=path, reason="its folder does not exist")


def write(document: ComparisonDocument, options: ReportArguments) -> None:
    """Write the reports that ``options`` names. Raises ``output_failed``."""
    for path, text in (
        (options.junit, junit),
        (options.github, github_action_benchmark),
        (options.bencher, bencher),
    ):
        if path is not None:
            _write(path, text(document), "w")
    if options.markdown is not None:
        _write(options.markdown, markdown(document), "a")


def _write(path: Path, text: str, mode: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as problem:
        raise error("output_failed", path=path, reason=problem.strerror or problem) from None


def markdown(document: ComparisonDocument) -> str:
    """Return a heading with the verdict, a table of the metrics and one of the counters that changed."""
    mark = _MARKS.get(document["verdict"], f"✅ {document['verdict']}")
    lines = [
        f"### aiakq bench: {mark}",
        "",
        f"Base: {_cell(document['base'])}  ",
        f"New: {_cell(document['new'])}",
        "",
    ]
    if document["metrics"]:
        confidence, margin = 100 * document["confidence"], 100 * document["margin"]
        lines += [f"| metric | base | new | change ({confidence:g} % interval) | verdict |", "|---|--:|--:|--:|---|"]
        for row in document["metrics"]:
            verdict = _MARKS.get(row["verdict"], row["verdict"]) if row["gated"] else ""
            cells = (row["metric"], _number(row["base"]), _number(row["new"]), change_text(row), verdict)
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
        lines += ["", f"Worse: by more than {margin:g} % at {confidence:g} % confidence."]
    changed = [row for row in document["counters"] if row["verdict"] == CHANGED]
    if document["counters"]:
        lines += ["", f"Exact counters: {len(changed)} of {len(document['counters'])} changed."]
    if changed:
        lines += ["", "| counter | base | new |", "|---|--:|--:|"]
        lines += [f"| {_cell(row['counter'])} | {row['base']} | {row['new']} |" for row in changed]
    lines += [f"\n> {_cell(text)}" for text in document["warnings"]]
    return "\n".join(lines) + "\n\n"


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def junit(document: ComparisonDocument) -> str:
    """Return JUnit XML with a test case per gated metric and counter; undecided ones are skipped."""
    cases = [(row["metric"], row["verdict"], change_text(row)) for row in document["metrics"] if row["gated"]]
    cases += [(row["counter"], row["verdict"], f"{row['base']} -> {row['new']}") for row in document["counters"]]
    failed = sum(verdict in (WORSE, CHANGED) for _, verdict, _ in cases)
    skipped = sum(verdict == UNDECIDED for _, verdict, _ in cases)
    counts = {"tests": str(len(cases)), "failures": str(failed), "skipped": str(skipped), "errors": "0"}
    suite = ElementTree.Element("testsuite", {"name": "aiakq bench", **counts})
    for name, verdict, text in cases:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "aiakq.bench", "name": name})
        if verdict in (WORSE, CHANGED):
            ElementTree.SubElement(case, "failure", {"type": verdict, "message": f"{verdict}: {text}"})
        elif verdict == UNDECIDED:
            ElementTree.SubElement(case, "skipped", {"message": f"undecided: {text}"})
        else:
            ElementTree.SubElement(case, "system-out").text = f"{verdict}: {text}"
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def github_action_benchmark(document: ComparisonDocument) -> str:
    """Return a ``customSmallerIsBetter`` array of github-action-benchmark, with the reciprocals of rates."""
    entries = []
    for name, value, row in _values(document):
        higher = row is not None and row["higher_is_better"]
        entry = {
            "name": f"1 / {name}" if higher else name,
            "unit": ("s" if higher else _unit(name)),
            "value": 1 / value if higher else value,
        }
        if row is not None and row["low"] is not None:
            entry["extra"] = f"{change_text(row)} of the base"
        entries.append(entry)
    return json.dumps(entries, indent=2) + "\n"


def bencher(document: ComparisonDocument) -> str:
    """Return Bencher Metric Format: benchmark -> measure -> value and bounds of the new side."""
    measures: dict[str, dict[str, float]] = {}
    for name, value, row in _values(document):
        measure = {"value": value}
        if row is not None and row["low"] is not None and row["high"] is not None:
            # The interval is that of the ratio, so the bounds are relative to the measured base.
            measure |= {"lower_value": row["base"] * row["low"], "upper_value": row["base"] * row["high"]}
        measures[name] = measure
    return json.dumps({"aiakq bench": measures}, indent=2) + "\n"


def _values(document: ComparisonDocument) -> Iterable[tuple[str, float, MetricRow | None]]:
    """Yield (name, value of the new side, row) of every metric, then (name, value, None) of its counters."""
    yield from ((row["metric"], row["new"], row) for row in document["metrics"])
    yield from ((row["counter"], row["new"], None) for row in document["counters"] if row["new"] is not None)


def _unit(name: str) -> str:
    return _UNITS.get(name.partition(".")[0].rpartition("_")[2], "count")
