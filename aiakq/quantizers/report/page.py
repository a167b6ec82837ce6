"""The HTML report of ``aiakq quantize``."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from aiakq import formats
from aiakq.evaluation.wording import DECIDES, INTERVAL_ROW, counted, figure_rows, kl_text, quoted
from aiakq.html_report.charts import BlockMarks, Mark, bars, dumbbells
from aiakq.html_report.numbers import duration, percent, size
from aiakq.html_report.render import render
from aiakq.quantizers.report.records import LayerResult, QuantizeReport

_BLOCK = re.compile(r"\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.\d+\b")
#: Of longer tables only the layers with the largest errors are shown.
_MAX_ROWS = 2000
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


def html_page(report: QuantizeReport) -> str:
    """Return the whole page. Equal reports give equal pages."""
    return render(
        "quantize.html",
        title=f"{_name(report.input)} by {report.method}",
        subtitle=_subtitle(report),
        report=report,
        cards=_cards(report),
        notes=_notes(report),
        quality=_quality(report),
        errors=_errors(report),
        ranges=_ranges(report),
        experts=_experts(report),
        calibration=_calibration(report),
        layers=_layers(report.layers),
        commands=_commands(report),
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


def _cards(report: QuantizeReport) -> list[dict[str, object]]:
    """Return the headline numbers: name, value, about, and share of a bar or None."""
    part = report.bytes_after / report.bytes_before if report.bytes_before else 1.0
    rows: list[tuple[str, str, str]] = [
        ("size", size(report.bytes_after), f"{part:.0%} of {size(report.bytes_before)}"),
        ("bits per weight", f"{report.bits_per_weight:.2f}", "in quantized layers, scales included"),
    ]
    before, after = report.perplexity_before, report.perplexity_after
    if report.kl is not None:
        rows.append(("KL divergence", f"{report.kl:.3g}", "nats per token from the original; this number decides"))
    if report.top1_agreement is not None:
        rows.append(("top-1 agreement", f"{report.top1_agreement:.2%}", f"of {report.evaluation_tokens:,} tokens"))
    if before is not None and after is not None:
        rows.append(("perplexity", f"{after:.5g}", f"{after / before - 1:+.2%} from {before:.5g}"))
    worst = report.worst
    if worst is not None and report.mean_error is not None:
        text = f"worst {percent(worst.error)} in {_short(worst.name)}"
        rows.append(("mean layer error", percent(report.mean_error), text))
    if report.seconds:
        memory = f"{size(report.peak_memory_bytes)} peak memory" if report.peak_memory_bytes else ""
        rows.append(("time", duration(report.seconds), memory))
    if report.verified:
        rows.append(("verified", f"{report.verified} layers", "read back, bit-identical"))
    shares = {"size": min(part, 1.0)}
    return [{"name": name, "value": value, "about": about, "share": shares.get(name)} for name, value, about in rows]


def _notes(report: QuantizeReport) -> list[str]:
    resumed = f"{report.resumed_from} steps were taken over from an interrupted run."
    notes = [note for note in report.notes if note not in _remarks_on(report)]
    return [*notes, *([resumed] if report.resumed_from else [])]


# --- quality ----------------------------------------------------------------------------------------------------------


def _quality(report: QuantizeReport) -> dict[str, object] | None:
    """Return the sentence on what decides, the table of texts and the worst tokens; None if nothing was measured."""
    if not report.evaluations:
        return None
    worst = [
        {"name": text["name"], "rows": [_worst_row(each) for each in text["worst_tokens"]]}
        for text in report.evaluations
    ]
    head = ["", *(text["name"] for text in report.evaluations)]
    # HTML drops leading spaces, but not this one.
    indented = INTERVAL_ROW.replace("  ", "\N{EM SPACE}", 1)
    rows = [(indented if row[0] == INTERVAL_ROW else row[0], *row[1:]) for row in figure_rows(report.evaluations)]
    return {"decides": DECIDES, "remarks": _remarks_on(report), "head": head, "rows": rows, "worst": worst}


def _remarks_on(report: QuantizeReport) -> list[str]:
    """Return the remarks on the figures of texts."""
    return [text["remark"] for text in report.evaluations if text["remark"]]


def _worst_row(worst: dict[str, Any]) -> tuple[str, ...]:
    def listed(choices: Sequence[dict[str, Any]]) -> str:
        return ", ".join(f"{quoted(each['token'])} {percent(each['p'])}" for each in choices)

    ours, theirs = (f"{listed(worst[key])}" for key in ("choices", "original_choices"))
    next_token = f"{quoted(worst['token'])} ({percent(worst['p_original'])}, {percent(worst['p'])})"
    return (kl_text(worst["kl"]), quoted(worst["context"][-60:]), next_token, theirs, ours)


# --- charts -----------------------------------------------------------------------------------------------------------


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


def _errors(report: QuantizeReport) -> dict[str, object] | None:
    """Return the chart of errors, its kinds of layers, and whether marks stand for several experts."""
    measured = [layer for layer in report.layers if layer.error is not None]
    if not measured:
        return None
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
    several = any(mark.other for block in blocks for mark in block.marks)
    return {"kinds": kinds, "chart": bars(blocks, "error of each layer"), "several": several}


def _range_changed(layer: LayerResult, what: str) -> bool:
    """Whether the range of a layer changed by more than its last digits."""
    before, after = getattr(layer, f"{what}_before"), getattr(layer, f"{what}_after")
    return before is None or abs(after - before) > 0.005 * max(before, after)


def _ranges(report: QuantizeReport) -> list[dict[str, object]]:
    """Return the charts of ranges that changed, each with its title, explanation and kinds of layers."""
    found = []
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
        chart = dumbbells(blocks, f"{title} before and after")
        found.append({"title": title, "about": about, "kinds": kinds, "chart": chart})
    return found


# --- tables -----------------------------------------------------------------------------------------------------------


def _experts(report: QuantizeReport) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for entry in report.experts:
        numbers = sorted(entry.tokens) or [0]
        median = f"{statistics.median(numbers):g}"
        counts = (len(entry.tokens), numbers[0], median, numbers[-1], entry.minimum)
        rows.append((entry.name, *counts, _numbers(entry.everywhere), _numbers(entry.rounded)))
    return rows


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "") or "none"


def _calibration(report: QuantizeReport) -> str:
    if report.calibration is None:
        return ""
    text = f"{counted(report.tokens, 'token')} of {report.calibration}"
    if report.calibration_lengths is not None:
        low, middle, high = report.calibration_lengths
        each = counted(low, "token") if low == high else f"{low} to {high} tokens (median {middle})"
        text += f", {counted(report.samples, 'sample')} of {each}"
    return text


def _layers(layers: Sequence[LayerResult]) -> dict[str, Any]:
    """Return head, rows and style of the table of layers."""
    head = ["layer", "outputs x inputs", "bits", "group", "error", "weight before", "after", "input before", "after"]
    remarked = any(layer.remarks for layer in layers)
    if len(layers) > _MAX_ROWS:
        layers = sorted(layers, key=lambda layer: -(layer.error or 0.0))[:_MAX_ROWS]
    rows = [
        (
            layer.name,
            f"{layer.n} x {layer.k}",
            layer.bits,
            "row" if layer.group_size == -1 else layer.group_size,
            percent(layer.error),
            *(
                "" if value is None else value
                for value in (layer.weight_before, layer.weight_after, layer.input_before, layer.input_after)
            ),
            *((_remarks(layer.remarks),) if remarked else ()),
        )
        for layer in layers
    ]
    return {"head": [*head, *(["remarks"] if remarked else [])], "rows": rows, "style": "remarked" if remarked else ""}


def _remarks(remarks: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in remarks.items()
    )


def _commands(report: QuantizeReport) -> str:
    folder = shlex.quote(_name(report.output))  # the page may be published, so paths of this machine are left out
    more = f" --tensor-parallel-size {report.tp}" if report.tp > 1 else ""
    lines = [f"aiakq serve {folder}", f"aiakq inspect {folder}"]
    if not report.not_in_vllm and formats.readers(report.format, {report.scheme}, bool(report.experts)).vllm:
        lines.append(f"vllm serve {folder}{more}")
    return "\n".join(lines)


def _short(name: str) -> str:
    match = _BLOCK.search(name)
    return f"block {match[1]}, {name[match.end() :]}" if match else name
