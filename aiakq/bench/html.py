"""HTML report of ``bench serve`` or ``bench sweep``: one self-contained file with SVG charts."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from aiakq.bench.summary import percentile

#: Size of a chart and its margins, in pixels.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM, _TOP = 640, 270, 64, 30, 40, 24
_COLOURS = ("#3b78d8", "#dc6b1f", "#2f9e57", "#9b59b6", "#d0453a", "#1a93a0", "#9a8316", "#808080")
_STYLE = """
:root { color-scheme: light dark; --text: #222; --back: #fff; --rule: #ddd; --note: #fff3cd; }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --back: #1b1b1b; --rule: #3d3d3d; --note: #4a3f14; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
body { color: var(--text); background: var(--back); overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; }
h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .7rem .15rem 0; text-align: right; border-bottom: 1px solid var(--rule); }
.wide td, .wide th { white-space: nowrap; }
td:first-child, th:first-child, .settings td { text-align: left; }
.settings td { vertical-align: top; }
.warning { background: var(--note); padding: .5rem .8rem; margin: .4rem 0; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--text); font-size: 12px; }
svg .rule { stroke: var(--rule); }
@media (max-width: 600px) { svg text { font-size: 17px; } }
"""
#: Content security policy that forbids loading anything, whatever names and settings contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Point = tuple[float, float]


def page(document: Mapping[str, Any]) -> str:
    """Return the report of a record of kind serve or sweep. Distributions and timelines need ``detailed`` timings."""
    levels = document["levels"] if document["kind"] == "sweep" else [{"level": "this run", **document}]
    levels = [{"request_rate": None, **level} for level in levels]
    config = document["config"]
    title = f"aiakq bench {document['kind']}: {config.get('model')}"
    parts = [f"<h1>{_text(title)}</h1>", f"<p>{_text(document['date'])}, seed {document['seed']}</p>"]
    parts += [f'<p class="warning">{_text(text)}</p>' for text in document["warnings"]]
    parts += ["<h2>Results</h2>", "<p>Times in milliseconds.</p>", _results(levels)]
    if len(levels) > 1:
        parts += ["<h2>Latency against throughput</h2>", _latency_against_throughput(levels)]
    for key, name in (("ttfts", "Time to first token"), ("latencies", "End-to-end latency")):
        curves = [(level["level"], _milliseconds(level, key)) for level in levels]
        curves = [(name, values) for name, values in curves if len(values) > 1]
        if curves:
            parts += [f"<h2>{name}: share of requests within so many ms</h2>", _distributions(curves)]
    for level in levels[-1:] if len(levels) == 1 else levels:
        if level.get("detailed"):
            parts += [f"<h2>Timeline: {_text(level['level'])}</h2>", _timeline(level["detailed"])]
    parts += ["<h2>Settings</h2>", _settings({**config, **_flat(document["environment"])})]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _number(value: object) -> str:
    return "–" if value is None else f"{value:,.4g}" if isinstance(value, float) else _text(value)


def _results(levels: Sequence[Mapping[str, Any]]) -> str:
    heads = (
        "load",
        "done",
        "failed",
        "requests/s",
        "tokens/s",
        "good",
        "TTFT p50",
        "p99",
        "TPOT p50",
        "p99",
        "E2E p99",
    )
    rows = []
    for level in levels:
        share = level.get("goodput_share")
        cells = [level["level"], level["completed"], level["failed"], level["request_throughput"]]
        cells += [level["output_throughput"], None if share is None else f"{share:.1%}"]
        for name, ranks in (("ttft_ms", ("p50", "p99")), ("tpot_ms", ("p50", "p99")), ("e2el_ms", ("p99",))):
            cells += [level[name][rank] for rank in ranks]
        rows.append("<tr>" + "".join(f"<td>{_number(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _latency_against_throughput(levels: Sequence[Mapping[str, Any]]) -> str:
    """Plot a dot for each level, and a line through those with a request rate."""
    charts = []
    for name, ranks in (("ttft", ("p50", "p99")), ("tpot", ("p50", "p99"))):
        curves, dots = [], []
        for rank in ranks:
            label = f"{name.upper()} {rank}"
            measured = [level for level in levels if level[f"{name}_ms"][rank] and level["output_throughput"]]
            points = {id(level): (level["output_throughput"], level[f"{name}_ms"][rank]) for level in measured}
            rated = sorted((level for level in measured if level["request_rate"]), key=lambda one: one["request_rate"])
            curves.append((label, [points[id(level)] for level in rated]))
            dots.append([(points[id(level)], f"{level['level']}: {label}") for level in measured])
        charts.append(_chart(curves, "output tokens/s", "ms", dots))
    note = "Lines connect the levels with a request rate; the other dots are closed loops (one at a time, saturated)."
    return "".join([*charts, f"<p>{note}</p>"])


def _milliseconds(level: Mapping[str, Any], key: str) -> list[float]:
    return sorted(1000 * value for value in (level.get("detailed") or {}).get(key) or () if value is not None)


def _distributions(curves: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Plot the cumulative distribution of requests up to the 99th percentile."""
    points = []
    for name, values in curves:
        ranks = [index / 50 * 99 for index in range(51)]
        points.append((name, [(percentile(values, rank), rank) for rank in ranks]))
    return _chart(points, "ms", "% done")


def _timeline(detailed: Mapping[str, Any]) -> str:
    """Plot requests in flight and output tokens per second over the run."""
    spans = [
        (start, start + latency)
        for start, latency in zip(detailed["start_times"], detailed["latencies"], strict=True)
        if latency is not None
    ]
    if not spans:
        return "<p>No request was completed.</p>"
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
    return _chart([("in flight", running)], "s", "requests") + _chart([("output", rate)], "s", "tokens/s")


def _chart(
    curves: Sequence[tuple[str, Sequence[Point]]],
    x_name: str,
    y_name: str,
    dots: Sequence[Sequence[tuple[Point, str]]] = (),
) -> str:
    """Return a line chart as SVG with both axes starting at 0. ``dots`` are labelled points of each curve."""
    points = [point for _, curve in curves for point in curve] + [point for own in dots for point, _ in own]
    if not points:
        return "<p>Not measured.</p>"
    right, top = (_round_up(max(point[axis] for point in points)) for axis in (0, 1))
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - _TOP

    def coordinates(point: Point) -> str:
        return f"{_LEFT + width * point[0] / right:.1f},{_TOP + height * (1 - point[1] / top):.1f}"

    legend = 18 * math.ceil(len(curves) / 3)
    name = _text(f"{y_name} against {x_name}: {', '.join(name for name, _ in curves)}")
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT + legend}" width="{_WIDTH}"'
    lines = [f'<svg {size} role="img" aria-label="{name}">', *_axes(right, top, x_name, y_name)]
    for index, (name, curve) in enumerate(curves):
        colour = _COLOURS[index % len(_COLOURS)]
        path = " ".join(map(coordinates, curve))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for point, label in dots[index] if dots else ():
            x_text, _, y_text = coordinates(point).partition(",")
            tip = f"<title>{_text(label)} {_label(point[1])} {_text(y_name)}</title>"
            lines.append(f'<circle cx="{x_text}" cy="{y_text}" r="4" fill="{colour}">{tip}</circle>')
        x, y = _LEFT + (index % 3) * 190, _HEIGHT + 10 + 18 * (index // 3)
        # The colour is set by style, because the CSS rule for text overrides an attribute.
        mark = f'<tspan style="fill:{colour}">\N{BLACK SQUARE}</tspan>'
        lines.append(f'<text x="{x}" y="{y}">{mark} {_text(name)}</text>')
    return "\n".join([*lines, "</svg>"])


def _axes(right: float, top: float, x_name: str, y_name: str) -> list[str]:
    """Return the grid lines, tick labels and names of both axes."""
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - _TOP
    lines = []
    for part in range(5):
        x, y = _LEFT + width * part / 4, _TOP + height * (1 - part / 4)
        lines.append(f'<line class="rule" x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_label(top * part / 4)}</text>')
        number = f'<text x="{x:.1f}" y="{_TOP + height + 17}" text-anchor="middle">{_label(right * part / 4)}</text>'
        lines.append(number)
    lines.append(f'<text x="{_LEFT + width}" y="{_HEIGHT - 6}" text-anchor="end">{_text(x_name)}</text>')
    lines.append(f'<text x="2" y="{_TOP - 10}">{_text(y_name)}</text>')
    return lines


def _label(value: float) -> str:
    """Format a tick label, without an exponent for large numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _round_up(value: float) -> float:
    """Round up to a number whose quarters have few digits: 1, 1.2, 1.6, 2, ... times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(value))
    steps = (1, 1.2, 1.6, 2, 2.4, 2.8, 3.2, 4, 5, 6, 8, 10)
    return next(step * power for step in steps if step * power >= value * 0.999)


def _flat(document: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in document.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _settings(settings: Mapping[str, object]) -> str:
    rows = (
        f"<tr><td>{_text(key)}</td><td>{_text(value)}</td></tr>"
        for key, value in settings.items()
        if value not in (None, {}, [], ())
    )
    return f'<table class="settings">{"".join(rows)}</table>'
