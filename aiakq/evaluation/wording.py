"""What reports say about quality: which number decides, and what a perplexity below the original's means.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Which number decides; the documentation says it in the same words.
DECIDES = (
    "KL divergence from the original decides which quantization is better: it counts every change of the predictions, "
    "while perplexity and task scores can improve by chance."
)
#: Verdicts on a model against another one.
BETTER, WORSE, SAME, MIXED = "better", "worse", "not distinguishable", "better on some texts, worse on others"
#: Name of the rows of intervals in a table of figures.
INTERVAL_ROW = "  95 % interval"


def perplexity_remark(text: Mapping[str, Any]) -> str | None:
    """Return a sentence if the perplexity on a text is below the original's, else None.

    ``text`` is an entry of the document's ``texts``.
    """
    ratio = text["perplexity_ratio"]
    if ratio is None or not ratio < 1:
        return None
    bounds = text["perplexity_ratio_interval"]
    within = "" if bounds is None else f"; 95 % interval {interval_text(bounds, change_text)}"
    chance = bounds is None or bounds["high"] >= 1
    why = "and may be chance" if chance else "but a difference from the original that happens to suit this text"
    return (
        f"On {text['name']} the perplexity is below the original's ({change_text(ratio)}{within}). "
        f"This is not fidelity, {why}."
    )


def quoted(text: str) -> str:
    """Return text of a model in quotes, with escapes for control, invisible and invalid characters."""
    return repr(text)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, whose plural ends in s: 1 thread, 1,024 threads."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent_text(value: float) -> str:
    """Return a fraction as a percentage."""
    return f"{100 * value:.2f} %"


def change_text(ratio: float) -> str:
    """Return a ratio as a change in percent."""
    return f"{100 * (ratio - 1):+.2f} %"


def kl_text(value: float | None) -> str:
    """Return a divergence with three digits; None is one that is not finite."""
    if value is None:
        return "infinite"
    if value == 0:
        return "0"
    return f"{value:#.3g}" if value >= 1e-3 else f"{value:.1e}"


def _perplexity(value: float) -> str:
    return f"{value:,.4g}"


def _count(value: float) -> str:
    return f"{value:,}"


#: Figures of a text in the order of reports: name, key, format.
_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("KL divergence", "kl", kl_text),
    ("KL, median", "kl_median", kl_text),
    ("KL, 99 %", "kl_p99", kl_text),
    ("KL, maximum", "kl_max", kl_text),
    ("top-1 agreement", "top1_agreement", percent_text),
    ("perplexity", "perplexity", _perplexity),
    ("of the original", "perplexity_original", _perplexity),
    ("change", "perplexity_ratio", change_text),
    ("tokens", "tokens", _count),
)


def figure_rows(texts: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of a table of texts: the name of a figure, and its value on each; intervals in rows of their own.

    Perplexity itself has no interval where its change has one.
    """
    rows = []
    for name, key, shown in _FIGURES:
        values = [text.get(key) for text in texts]
        if all(value is None for value in values):
            continue
        rows.append((name, *("-" if value is None else shown(value) for value in values)))
        bounds = [text.get(f"{key}_interval") for text in texts]
        if any(bounds) and not (key == "perplexity" and any(text.get("perplexity_ratio") for text in texts)):
            rows.append((INTERVAL_ROW, *(interval_text(each, shown) for each in bounds)))
    return rows


def interval_text(bounds: Mapping[str, float] | None, shown: Callable[[float], str] = kl_text) -> str:
    """Return an interval in words, with the unit once; a dash for None."""
    if bounds is None:
        return "-"
    low, high = shown(bounds["low"]), shown(bounds["high"])
    return f"{low.removesuffix(' %')} to {high}"
