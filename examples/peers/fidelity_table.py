"""The tables of fidelity in docs/quality.md: KL divergence with intervals, and differences from our default."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import figures
import torch
from fidelity import OTHER_TEXTS
from rows import Row

from aiakq.evaluation.intervals import Interval, Resamples
from aiakq.evaluation.text_quality import verdict
from aiakq.evaluation.wording import DECIDES

Result = dict[str, Any]

ABOUT = f"""\
## How to read the tables of fidelity

{DECIDES}
Intervals are 95 %: 2,000 seeded resamples of whole windows, of blocks of 128 tokens for the 99 % quantile and the
other texts. *Against ours* is paired: both models predict the same tokens, so that what is hard about a text cancels
out; *better* and *worse* are those of the row, where the interval excludes 0. *max*: the largest KL divergence of any
token. *dialogue*, *code*: bundled texts unlike the calibration text; they are not averaged with the others. A
perplexity below the original's (a negative *change* above) is not fidelity: the model differs from its original, and
happens to suit that text."""
#: Columns that a published row has cells for.
HEAD = ("KL", "against ours", "99 %", "max", "top-1")


def table(rows: Sequence[Row], found: dict[str, Result], default: Row | None) -> list[str]:
    """Return a table of rows of one kind; ``default`` is the row that others are compared with."""
    rows = [row for row in rows if "kl" in found[row.slug] or "fidelity" in found[row.slug]]
    if not rows:
        return []
    texts = [name for name in OTHER_TEXTS if any(name in _texts(found[row.slug]) for row in rows)]
    head = ["tool", "settings", *HEAD, *texts]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        result, ours = found[row.slug], None if default is None or default is row else found[default.slug]
        cells = [row.tool, (f"**{row.name}**" if row is default else row.name) + figures.mark(result)]
        if figures.is_published(result):
            cells += [result["fidelity"].get(name, "") for name in (*HEAD, *texts)]
        else:
            cells += _cells(result, ours, texts)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _texts(result: Result) -> Result:
    """Other texts that a row has figures for."""
    return result["fidelity"] if figures.is_published(result) else result.get("texts", {})


def _cells(result: Result, ours: Result | None, texts: Sequence[str]) -> list[str]:
    """The cells of a measured row from the mean on."""
    cells = [_mean(result["kl"], ".5f"), _against(result, ours), _quantile(result), _figure(result.get("kl_max"))]
    cells.append(_mean([100 * value for value in result["same"]], ".1f") + " %")
    for name in texts:
        text, other = result.get("texts", {}).get(name), (ours or {}).get("texts", {}).get(name)
        cells.append("" if text is None else f"{_average(text['kl']):.5f} {_against(text, other)}".strip())
    return cells


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Interval | None, Interval | None]:
    """Return the ratio of two means over the same windows, its interval, and that of their difference."""
    one, other = (torch.tensor(values, dtype=torch.float64).unsqueeze(1) for values in (ours, theirs))
    resamples = Resamples(len(one), 1, independent=True)
    return float(one.sum() / other.sum()), resamples.ratio(one, other), resamples.mean(one - other)


def _against(result: Result, ours: Result | None) -> str:
    """Describe how much larger the divergence of ``result`` is than that of our default; empty for no default."""
    if ours is None:
        return ""
    if figures.is_published(ours):
        same = figures.same_original(result, ours)
        return f"{100 * (figures.kl(result) / figures.kl(ours) - 1):+.1f} %" if same else ""
    if not figures.pairable(result, ours):
        return ""
    ratio, interval, difference = paired(result["kl"], ours["kl"])
    if interval is None:
        return f"{100 * (ratio - 1):+.1f} %"
    return f"{100 * (ratio - 1):+.1f} % ({_percent(interval)}), {verdict(difference)}"


def _percent(interval: Interval) -> str:
    return f"{100 * (interval.low - 1):+.1f} to {100 * (interval.high - 1):+.1f}"


def _mean(values: Sequence[float], shown: str) -> str:
    column = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
    interval = Resamples(len(column), 1, independent=True).mean(column)
    within = "" if interval is None else f" ({interval.low:{shown}} to {interval.high:{shown}})"
    return f"{_average(values):{shown}}{within}"


def _average(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _quantile(result: Result) -> str:
    interval = result.get("kl_p99_interval")
    within = "" if interval is None else f" ({interval[0]:.3g} to {interval[1]:.3g})"
    return _figure(result.get("kl_p99")) + within


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
