"""Tables of evaluations: figures of every text with intervals, paired differences, the worst tokens, tasks."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from aiakq.evaluation.wording import BETTER, INTERVAL_ROW, SAME, WORSE, counted, figure_rows, kl_text, quoted
from aiakq.terminal import console
from aiakq.terminal.console import facts, number, plain, result_line, show, table

#: Width of a column of the table of texts, and of its first one.
_COLUMN, _NAMES = 20, 18
#: Characters of context shown before a token.
_CONTEXT = 56
#: Styles of verdicts.
_VERDICTS = {BETTER: "green", SAME: "yellow", WORSE: "bold red"}


def quality_result(document: Mapping[str, Any]) -> None:
    """Print an evaluation: the model, its quality on each text, comparisons with other models, and tasks."""
    config, environment = document["config"], document["environment"]
    texts = document["texts"]
    rows: dict[str, object] = {
        "model": f"{config['model']} ({config['quantization']})",
        "original": config["original"],
        "device": f"{environment['device_name']}, {counted(environment['threads'], 'thread')}, {environment['dtype']}",
        "duration": console.seconds(document["duration"]),
    }
    facts("evaluation", rows)
    text_table(texts)
    for other in document.get("versus") or ():
        result_line((f"{plain(other['model'])} ({other['quantization']})", "bold"))
        text_table(other["texts"])
    if config["original"] is not None:
        wrapped(_about_intervals(texts, config["bootstrap"]["resamples"]), "dim")
        worst_tokens(texts)
    for compared in document.get("comparisons") or ():
        _comparison(compared)
    _tasks(document.get("tasks") or ())
    result_line("")
    for remark in document["remarks"]:
        wrapped(remark)


def _about_intervals(texts: Sequence[Mapping[str, Any]], resamples: int) -> str:
    """Say how the intervals of some texts were made; a text that is too short has none."""
    long = [text for text in texts if text["kl_interval"] is not None]
    if not long:
        return "There are no intervals: the text is too short, or a divergence is not finite."
    lengths = " or ".join(str(length) for length in sorted({text["block_tokens"] for text in long}))
    return (
        f"Intervals by a block bootstrap: {resamples:,} resamples of blocks of {lengths} tokens. "
        "That of the maximum ends at the largest value seen."
    )


def text_table(texts: Sequence[Mapping[str, Any]]) -> None:
    """Print the figures of texts: one column for each, as many side by side as fit."""
    fit = max(1, (console.err().width - _NAMES) // _COLUMN)
    for start in range(0, len(texts), fit):
        part = texts[start : start + fit]
        grid = table("", *(plain(text["name"])[-(_COLUMN - 2) :] for text in part))
        for row in figure_rows(part):
            style = "dim" if row[0] == INTERVAL_ROW else ""
            grid.add_row(*(Text(cell, style) for cell in row))
        show(grid)


def worst_tokens(texts: Sequence[Mapping[str, Any]], shown: int = 3) -> None:
    """Print the predictions that changed most on each text: context, next token, both models' choices."""
    for text in texts:
        grid = Table(box=None, show_header=False, pad_edge=False)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for worst in text.get("worst_tokens", ())[:shown]:
            context = f"... {quoted(worst['context'][-_CONTEXT:])}, next {quoted(worst['token'])}"
            grid.add_row(f"KL {kl_text(worst['kl'])}", Text(context))
            grid.add_row("  original", Text(_choices(worst["original_choices"], worst["p_original"])))
            grid.add_row("  this model", Text(_choices(worst["choices"], worst["p"])))
        if grid.row_count:
            result_line("")
            result_line((f"tokens that changed most: {plain(text['name'])}", "bold"))
            show(grid)


def _choices(choices: Sequence[Mapping[str, Any]], actual: float) -> str:
    listed = ", ".join(f"{quoted(each['token'])} {_probability(each['p'])}" for each in choices)
    return f"{listed}; next {_probability(actual)}"


def _probability(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if value >= 0.001 else f"{value:.0e}"


def wrapped(text: str, style: str = "") -> None:
    """Print a sentence beside a table, in lines that fit."""
    for part in textwrap.wrap(plain(text), console.err().width):
        result_line((part, style))


def _comparison(compared: Mapping[str, Any]) -> None:
    """Print the paired differences of two models: KL of the first minus KL of the second."""
    grid = table("text", "KL", "other", "change, %", "95 %", "verdict", left=(0, 5))
    for text in compared["texts"]:
        ratio, bounds = text["kl_ratio"], text["kl_ratio_interval"]
        interval = "-" if bounds is None else f"{_percents(bounds['low'])} to {_percents(bounds['high'])}"
        verdict = Text(text["verdict"], _VERDICTS.get(text["verdict"], ""))
        kl = (number(text["kl"], 3), number(text["kl_versus"], 3))
        grid.add_row(plain(text["text"]), *kl, "-" if ratio is None else _percents(ratio), interval, verdict)
    result_line("")
    result_line((f"{plain(compared['model'])} against {plain(compared['versus'])}, paired", "bold"))
    show(grid)
    found: dict[str, list[str]] = {}
    for text in compared["texts"]:
        found.setdefault(text["verdict"], []).append(plain(text["text"]))
    verdicts = [
        f"{words} on {', '.join(found[verdict])}"
        for verdict, words in ((BETTER, "closer to the original"), (WORSE, "farther from it"), (SAME, SAME))
        if verdict in found
    ]
    overall = "" if compared["verdict"] == SAME else f"{compared['verdict']}: "
    wrapped(f"{compared['model']} is {overall}{'; '.join(verdicts)}.", "bold")


def _percents(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}"


def _tasks(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the scores of tasks, with the paired difference from the original."""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        compared = any("score_original" in row for row in mine)
        more = ("original", "difference", "95 %", "verdict") if compared else ()
        grid = table("task, metric", "score", *more, left=(0, 5) if compared else (0,))
        for row in mine:
            cells: list[Any] = [f"{plain(row['task'])}, {plain(row['metric'])}", number(row["score"])]
            if compared:
                bounds, verdict = row["difference_interval"], row["verdict"] or "-"
                interval = "-" if bounds is None else f"{bounds['low']:+.3f} to {bounds['high']:+.3f}"
                difference = "-" if row["difference"] is None else f"{row['difference']:+.3f}"
                cells += [number(row["score_original"]), difference, interval]
                cells.append(Text(verdict, _VERDICTS.get(verdict, "")))
            grid.add_row(*cells)
        result_line("")
        result_line((f"tasks of {plain(model)}" + (", paired with the original by item" if compared else ""), "bold"))
        show(grid)
