"""The HTML report: one self-contained page without scripts."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from aiakq import formats
from aiakq.quantizers.report.plots import KINDS, BlockMarks, Mark, bars, dumbbells
from aiakq.quantizers.report.records import LayerResult, QuantizeReport

_BLOCK = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.\d+\b")
#: Longer tables are collapsed; of much longer ones only the worst rows are shown.
_ROWS_SHOWN = 64
_ROWS_AT_MOST = 2000

_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --card: #f5f6f8; --text: #1a1d21; --muted: #69707a; --line: #dfe2e7;
  --accent: #2463c9; --warn: #fff5dd; --warn-line: #d99a00; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --card: #1e2329; --text: #e6e8eb; --muted: #98a1ac;
  --line: #313840; --accent: #7aaeff; --warn: #352a10; --warn-line: #c99420; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 18px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 6px; }
p { margin: 6px 0; max-width: 76ch; }
.muted, small { color: var(--muted); }
code, pre { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--card); border-radius: 8px; padding: 10px 14px; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; margin: 10px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(200px, 45%), 1fr)); gap: 12px;
  margin: 22px 0 8px; }
.card { background: var(--card); border-radius: 10px; padding: 12px 14px; }
.card b { display: block; font-size: 22px; font-weight: 600; line-height: 1.3; font-variant-numeric: tabular-nums; }
.card span { display: block; color: var(--muted); font-size: 13px; }
.bar { height: 6px; border-radius: 3px; background: var(--line); margin: 8px 0 4px; }
.bar i { display: block; height: 6px; border-radius: 3px; background: var(--accent); min-width: 3px; }
.warnings { background: var(--warn); border-left: 4px solid var(--warn-line); border-radius: 6px; padding: 8px 16px;
  margin: 18px 0; }
ul { padding-left: 20px; margin: 6px 0; } li { overflow-wrap: anywhere; margin: 3px 0; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 720px; height: auto; }
svg text { font-size: 12px; fill: var(--text); } svg text.muted { fill: var(--muted); }
.grid { stroke: var(--line); } .axis { stroke: var(--muted); }
.line { stroke: currentColor; stroke-width: 1.2; fill: none; opacity: .55; }
svg g { color: inherit; fill: currentColor; } .ring { fill: var(--bg); stroke: currentColor; stroke-width: 1.4; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; margin: 6px 0 4px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; background: currentColor;
  margin-right: 6px; vertical-align: -1px; } .legend span span { color: var(--text); }
.legend .hollow { background: none; border: 2px solid currentColor; border-radius: 50%; }
.legend .full { border-radius: 50%; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
.remarked :is(th, td):last-child { text-align: left; white-space: normal; min-width: 8rem; }
th { color: var(--muted); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
summary { cursor: pointer; color: var(--accent); }
"""
#: The two range plots: title and explanation.
_RANGES = {
    "input": (
        "Inputs",
        "Largest absolute input of each layer during calibration. Smoothing lowers it where a few channels are far "
        "larger than the rest, so that one scale fits all of them.",
    ),
    "weight": (
        "Weights",
        "Largest absolute weight of each layer, in the source and after quantization. Folding in scales raises it; "
        "clipping lowers it.",
    ),
}
#: One colour per kind of layer, distinguishable on light and dark backgrounds.
_COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#3aa7a3", "#c9a227", "#9c755f", "#e377a8", "#8c8c96",
)  # fmt: skip


def html_page(report: QuantizeReport) -> str:
    """Return the whole page. Equal reports give equal pages."""
    title = f"{_name(report.input)} by {report.method}"
    colours = "".join(f".k{number} {{ color: {colour}; }}\n" for number, colour in enumerate(_COLOURS[:KINDS]))
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(_subtitle(report))}</p>',
        f"<pre>{escape(report.command)}</pre>" if report.command else "",
        _cards(report),
        _messages(report),
        _errors(report),
        _ranges(report),
        _experts(report),
        _calibration(report),
        _table(report.layers),
        _serving(report),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{colours}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2] or path


def _subtitle(report: QuantizeReport) -> str:
    parts = [report.scheme, f"{report.format} format", f"{report.dtype} elsewhere"]
    if report.tp > 1:
        parts.append(f"to be sharded over {report.tp} GPUs")
    parts.append(f"aiakq {report.version}")
    if report.created:
        parts.append(report.created)
    return " · ".join(parts)


# --- numbers ----------------------------------------------------------------------------------------------------------


def _cards(report: QuantizeReport) -> str:
    part = report.bytes_after / report.bytes_before if report.bytes_before else 1.0
    cards = [
        _card(
            "size",
            f"{size(report.bytes_after)}",
            f"{part:.0%} of {size(report.bytes_before)}",
            f'<div class="bar"><i style="width:{min(part, 1) * 100:.1f}%"></i></div>',
        ),
        _card("bits per weight", f"{report.bits_per_weight:.2f}", "in quantized layers, scales included"),
    ]
    before, after = report.perplexity_before, report.perplexity_after
    if before is not None and after is not None:
        cards.append(_card("perplexity", f"{after:.5g}", f"{after / before - 1:+.2%} from {before:.5g}"))
    if report.kl is not None:
        cards.append(_card("KL divergence", f"{report.kl:.3g}", "nats per token from the original"))
    if report.top1_agreement is not None:
        cards.append(
            _card("top-1 agreement", f"{report.top1_agreement:.2%}", f"of {report.evaluation_tokens:,} tokens")
        )
    worst = report.worst
    if worst is not None and report.mean_error is not None:
        text = f"worst {percent(worst.error)} in {_short(worst.name)}"
        cards.append(_card("mean layer error", percent(report.mean_error), text))
    if report.seconds:
        memory = f"{size(report.peak_memory_bytes)} peak memory" if report.peak_memory_bytes else ""
        cards.append(_card("time", duration(report.seconds), memory))
    if report.verified:
        cards.append(_card("verified", f"{report.verified} layers", "read back, bit-identical"))
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(name: str, value: str, about: str, more: str = "") -> str:
    return (
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b>{more}<span>{escape(about)}</span></div>'
    )


def _messages(report: QuantizeReport) -> str:
    parts = []
    if report.warnings:
        parts.append(f'<div class="warnings"><strong>Warnings</strong>{_list(report.warnings)}</div>')
    notes = list(report.notes)
    if report.resumed_from:
        notes.append(f"{report.resumed_from} steps were taken over from an interrupted run.")
    if notes:
        parts.append(f"<h2>Decided on the way</h2>{_list(notes)}")
    return "".join(parts)


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in lines)}</ul>"


# --- plots ------------------------------------------------------------------------------------------------------------


def _block_and_kind(name: str) -> tuple[str, str]:
    """Return the block of a layer and its kind; all experts are of one kind."""
    match = _BLOCK.search(name)
    block, inside = (match[1], name[match.end() :]) if match else ("", name)
    kind = "expert " + inside.rpartition(".")[2] if _EXPERT.search(inside) else inside
    return block or "head", kind


def _by_block(layers: Sequence[LayerResult]) -> tuple[list[str], list[tuple[str, list[tuple[int, list[LayerResult]]]]]]:
    """Return the kinds of layers, and (block, [(kind, its layers)]) in the order of the model."""
    kinds: dict[str, int] = {}
    blocks: dict[str, dict[int, list[LayerResult]]] = {}
    for layer in layers:
        block, kind = _block_and_kind(layer.name)
        number = kinds.setdefault(kind, len(kinds))
        blocks.setdefault(block, {}).setdefault(number, []).append(layer)
    return list(kinds), [(label, list(inside.items())) for label, inside in blocks.items()]


def _legend(kinds: Sequence[str], extra: str = "") -> str:
    named = "".join(
        f'<span class="k{number % KINDS}"><i></i><span>{escape(kind)}</span></span>'
        for number, kind in enumerate(kinds)
    )
    return f'<div class="legend">{extra}{named}</div>'


def _errors(report: QuantizeReport) -> str:
    measured = [layer for layer in report.layers if layer.error is not None]
    if not measured:
        return ""
    kinds, arranged = _by_block(measured)
    blocks = []
    for label, inside in arranged:
        marks = []
        for kind, layers in inside:
            values = [layer.error or 0.0 for layer in layers]
            worst = max(layers, key=lambda layer: layer.error or 0.0)
            mean = sum(values) / len(values)
            text = f"{worst.name}: {percent(max(values))}"
            if len(layers) > 1:
                text = f"{len(layers)} experts, {percent(mean)} on average; {text}"
            marks.append(Mark(kind, text, mean, max(values) if len(layers) > 1 else None))
        blocks.append(BlockMarks(label, tuple(marks)))
    several = (
        " For experts: the mean, with a line to the largest." if any(m.other for b in blocks for m in b.marks) else ""
    )
    return (
        "<h2>Error of each layer</h2>"
        f"<p>Relative error of each layer's output on the calibration inputs.{several}</p>"
        + _legend(kinds)
        + f'<div class="scroll">{bars(blocks, "error of each layer")}</div>'
    )


def _range_changed(layer: LayerResult, what: str) -> bool:
    """Whether the range of a layer changed by more than its last digits."""
    before, after = getattr(layer, f"{what}_before"), getattr(layer, f"{what}_after")
    return before is None or abs(after - before) > 0.005 * max(before, after)


def _ranges(report: QuantizeReport) -> str:
    parts = []
    for what, (title, about) in _RANGES.items():
        measured = [layer for layer in report.layers if getattr(layer, f"{what}_after") is not None]
        if not any(_range_changed(layer, what) for layer in measured):
            continue
        kinds, arranged = _by_block(measured)
        blocks = []
        for label, inside in arranged:
            marks = []
            for kind, layers in inside:
                after = max(getattr(layer, f"{what}_after") for layer in layers)
                before = max((getattr(layer, f"{what}_before") or 0.0 for layer in layers), default=0.0)
                text = f"{layers[0].name}: {before:.4g} before, {after:.4g} after"
                marks.append(Mark(kind, text, after, before))
            blocks.append(BlockMarks(label, tuple(marks)))
        key = '<span><i class="hollow"></i>before</span><span><i class="full"></i>after</span>'
        parts.append(
            f"<h2>{title}, before and after</h2><p>{about}</p>{_legend(kinds, key)}"
            f'<div class="scroll">{dumbbells(blocks, f"{title} before and after")}</div>'
        )
    return "".join(parts)


# --- tables -----------------------------------------------------------------------------------------------------------


def _experts(report: QuantizeReport) -> str:
    if not report.experts:
        return ""
    rows = []
    for entry in report.experts:
        numbers = sorted(entry.tokens) or [0]
        rows.append(
            (
                entry.name,
                str(len(entry.tokens)),
                str(numbers[0]),
                f"{statistics.median(numbers):g}",
                str(numbers[-1]),
                str(entry.minimum),
                _numbers(entry.everywhere),
                _numbers(entry.rounded),
            )
        )
    head = (
        "mixture",
        "experts",
        "min. tokens",
        "median",
        "max.",
        "required",
        "calibrated on all",
        "RTN",
    )
    return (
        "<h2>Experts</h2><p>Calibration tokens routed to each expert. An expert with too few is calibrated on "
        "every token of its block, or quantized with round-to-nearest (RTN) if these are too few.</p>"
        + _rows(head, rows)
    )


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "") or "none"


def _calibration(report: QuantizeReport) -> str:
    if report.calibration is None:
        return ""
    text = f"{report.tokens:,} tokens of {report.calibration}"
    if report.calibration_lengths is not None:
        low, middle, high = report.calibration_lengths
        each = f"{low} tokens" if low == high else f"{low} to {high} tokens (median {middle})"
        text += f", {report.samples} samples of {each}"
    lines = [f"<p>{escape(text)}.</p>"]
    if report.calibration_sha256:
        lines.append(f'<p class="muted">sha256 of the samples: <code>{escape(report.calibration_sha256)}</code></p>')
    if report.evaluation_text:
        lines.append(f"<p>Measured on {report.evaluation_tokens:,} tokens of {escape(report.evaluation_text)}.</p>")
    return "<h2>Calibration and evaluation</h2>" + "".join(lines)


def _table(layers: Sequence[LayerResult]) -> str:
    if not layers:
        return ""
    head = ("layer", "outputs x inputs", "bits", "group", "error", "weight before", "after", "input before", "after")
    remarked = any(layer.remarks for layer in layers)
    note = ""
    if len(layers) > _ROWS_AT_MOST:
        note = f"<p>The {_ROWS_AT_MOST:,} with the largest errors of {len(layers):,}; aiakq_report.json has all.</p>"
        layers = sorted(layers, key=lambda layer: -(layer.error or 0.0))[:_ROWS_AT_MOST]
    rows = [
        (
            layer.name,
            f"{layer.n} x {layer.k}",
            str(layer.bits),
            "row" if layer.group_size == -1 else str(layer.group_size),
            "" if layer.error is None else percent(layer.error),
            *(_figure(v) for v in (layer.weight_before, layer.weight_after, layer.input_before, layer.input_after)),
            *((_remarks(layer.remarks),) if remarked else ()),
        )
        for layer in layers
    ]
    drawn = _rows((*head, "remarks"), rows, "remarked") if remarked else _rows(head, rows)
    if len(rows) > _ROWS_SHOWN:
        drawn = f"<details><summary>{len(rows):,} layers</summary>{drawn}</details>"
    return "<h2>Layers</h2>" + note + drawn


def _remarks(remarks: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in remarks.items()
    )


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    drawn = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    table = f'<table class="{style}">' if style else "<table>"
    return f'<div class="scroll">{table}<thead><tr>{names}</tr></thead><tbody>\n{drawn}</tbody></table></div>'


def _serving(report: QuantizeReport) -> str:
    folder = shlex.quote(_name(report.output))  # the page may be published: paths of this machine are nobody's business
    more = f" --tensor-parallel-size {report.tp}" if report.tp > 1 else ""
    lines = [f"aiakq serve {folder}", f"aiakq inspect {folder}"]
    if formats.readers(report.format, {report.scheme}, bool(report.experts)).vllm:
        lines.append(f"vllm serve {folder}{more}")
    return (
        f"<h2>Serving</h2><pre>{escape(chr(10).join(lines))}</pre>"
        '<p class="muted">This page, aiakq_report.json and, because it lists their checksums, aiakq_manifest.json '
        "contain times. Repeating the command reproduces every other file of the folder byte for byte.</p>"
    )


# --- figures ----------------------------------------------------------------------------------------------------------


def _short(name: str) -> str:
    match = _BLOCK.search(name)
    return f"block {match[1]}, {name[match.end() :]}" if match else name


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def percent(value: float | None) -> str:
    """Format a fraction as a percentage with three significant digits."""
    if value is None:
        return ""
    return f"{value:.3%}" if value < 0.01 else f"{value:.2%}" if value < 0.1 else f"{value:.1%}"


def size(count: float) -> str:
    """Format a number of bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
