"""HTML report of ``bench serve`` or ``bench sweep``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiakq.bench.summary import percentile
from aiakq.html_report.charts import Curve, lines
from aiakq.html_report.render import render

#: Columns of the results; keys of a level and, for times, ranks of a summary.
_HEAD = ("load", "done", "failed", "requests/s", "tokens/s", "good", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p99")


def page(document: Mapping[str, Any]) -> str:
    """Return the report of a record of kind serve or sweep. Distributions and timelines need ``detailed`` timings."""
    levels = document["levels"] if document["kind"] == "sweep" else [{"level": "this run", **document}]
    levels = [{"request_rate": None, **level} for level in levels]
    config = document["config"]
    return render(
        "bench.html",
        title=f"aiakq bench {document['kind']}: {config.get('model')}",
        subtitle=f"{document['date']}, seed {document['seed']}",
        warnings=document["warnings"],
        head=_HEAD,
        results=[_result(level) for level in levels],
        sections=[*_over_levels(levels), *(_timeline(level) for level in levels if level.get("detailed"))],
        settings=_settings({**config, **_flat(document["environment"])}),
    )


def _figure(curves: Sequence[Curve], x_name: str, y_name: str) -> dict[str, object]:
    return {"names": [curve.name for curve in curves], "chart": lines(curves, x_name, y_name)}


def _result(level: Mapping[str, Any]) -> list[object]:
    share = level.get("goodput_share")
    cells = [level["level"], level["completed"], level["failed"], level["request_throughput"]]
    cells += [level["output_throughput"], None if share is None else f"{share:.1%}"]
    for name, ranks in (("ttft_ms", ("p50", "p99")), ("tpot_ms", ("p50", "p99")), ("e2el_ms", ("p99",))):
        cells += [level[name][rank] for rank in ranks]
    return cells


def _over_levels(levels: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """Return the sections that compare levels: latency against throughput, and distributions."""
    sections = []
    if len(levels) > 1:
        note = (
            "Lines connect the levels with a request rate; the other dots are closed loops (one at a time, saturated)."
        )
        figures = [_latency_against_throughput(levels, name) for name in ("ttft", "tpot")]
        sections.append({"title": "Latency against throughput", "figures": figures, "note": note})
    for key, name in (("ttfts", "Time to first token"), ("latencies", "End-to-end latency")):
        curves = [(str(level["level"]), _milliseconds(level, key)) for level in levels]
        curves = [(label, values) for label, values in curves if len(values) > 1]
        if curves:
            figure = _figure([_distribution(label, values) for label, values in curves], "ms", "% done")
            title = f"{name}: share of requests within so many ms"
            sections.append({"title": title, "figures": [figure], "note": ""})
    return sections


def _latency_against_throughput(levels: Sequence[Mapping[str, Any]], name: str) -> dict[str, object]:
    """Plot a dot for each level, and a line through those with a request rate."""
    curves = []
    for rank in ("p50", "p99"):
        label = f"{name.upper()} {rank}"
        measured = [level for level in levels if level[f"{name}_ms"][rank] and level["output_throughput"]]
        points = {id(level): (level["output_throughput"], level[f"{name}_ms"][rank]) for level in measured}
        rated = sorted((level for level in measured if level["request_rate"]), key=lambda one: one["request_rate"])
        dots = [(points[id(one)], f"{one['level']}: {label} {points[id(one)][1]:.3g} ms") for one in measured]
        curves.append(Curve(label, [points[id(level)] for level in rated], dots))
    return _figure(curves, "output tokens/s", "ms")


def _milliseconds(level: Mapping[str, Any], key: str) -> list[float]:
    return sorted(1000 * value for value in (level.get("detailed") or {}).get(key) or () if value is not None)


def _distribution(name: str, values: Sequence[float]) -> Curve:
    """Return the cumulative distribution of ``values`` (ascending) up to the 99th percentile."""
    ranks = [index / 50 * 99 for index in range(51)]
    return Curve(name, [(percentile(values, rank), rank) for rank in ranks])


def _timeline(level: Mapping[str, Any]) -> dict[str, object]:
    """Plot requests in flight and output tokens per second over the run."""
    detailed, title = level["detailed"], f"Timeline: {level['level']}"
    spans = [
        (start, start + latency)
        for start, latency in zip(detailed["start_times"], detailed["latencies"], strict=True)
        if latency is not None
    ]
    if not spans:
        return {"title": title, "figures": [], "note": "No request was completed."}
    end = max(stop for _, stop in spans)
    moments = [end * index / 120 for index in range(121)]
    running = [(moment, float(sum(start <= moment < stop for start, stop in spans))) for moment in moments]
    width = max(end / 40, 1e-9)
    tokens = [0.0] * 41
    for start, first, gaps, count in zip(
        detailed["start_times"], detailed["ttfts"], detailed["itls"], detailed["output_lens"], strict=True
    ):
        if first is None:
            continue
        moment, share = start + first, count / (len(gaps) + 1)
        for gap in (0.0, *gaps):
            moment += gap
            tokens[min(40, int(moment / width))] += share
    rate = [((index + 0.5) * width, value / width) for index, value in enumerate(tokens[:40])]
    figures = [
        _figure([Curve("in flight", running)], "s", "requests"),
        _figure([Curve("output", rate)], "s", "tokens/s"),
    ]
    return {"title": title, "figures": figures, "note": ""}


def _flat(document: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in document.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _settings(settings: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(key, str(value)) for key, value in settings.items() if value not in (None, {}, [], ())]
