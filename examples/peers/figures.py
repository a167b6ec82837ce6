"""What the tables of docs/quality.md say about a row, measured or published, and about two rows that are compared.

A published row has cells of an earlier page, and no values per window: its differences from another row are those of
that page, if both rows are, and otherwise ratios of means without an interval.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]
#: Behind the name of a row whose values per window are lost.
MARK = " †"


def is_published(result: Result) -> bool:
    return "published" in result


def is_scored(result: Result) -> bool:
    return "kl" in result or "cells" in result


def mark(result: Result) -> str:
    return MARK if is_published(result) else ""


def kl(result: Result) -> float:
    """The mean KL divergence."""
    return float(result["cells"]["KL"]) if is_published(result) else mean(result["kl"])


def loss(result: Result) -> float:
    """The logarithm of the perplexity."""
    return math.log(float(result["cells"]["perplexity"])) if is_published(result) else mean(result["loss"])


def original(result: Result) -> str:
    """The perplexity of the unquantized model, as shown: it tells one training of a model from another."""
    return result["original"] if is_published(result) else f"{math.exp(mean(result['loss_original'])):.3f}"


def same_original(one: Result, other: Result) -> bool:
    """Whether two rows are of the same unquantized model, so that they can be compared."""
    return original(one) == original(other)


def pairable(one: Result, other: Result) -> bool:
    """Whether both rows have values of the same windows and of the same unquantized model."""
    if is_published(one) or is_published(other):
        return False
    return len(one["kl"]) == len(other["kl"]) and one.get("loss_original") == other.get("loss_original")


def top1(result: Result) -> str:
    """How often the most likely token is that of the unquantized model."""
    return result["cells"]["top-1 agreement"] if is_published(result) else f"{100 * mean(result['same']):.1f} %"


def change(result: Result) -> str:
    """Perplexity relative to the unquantized model."""
    return result["cells"]["change"] if is_published(result) else percent(result["loss"], result["loss_original"])


def against(result: Result, ours: Result) -> str:
    """Perplexity of another row relative to ours."""
    if is_published(result):
        return result["cells"].get("against ours", "")
    if pairable(result, ours):
        return percent(result["loss"], ours["loss"])
    return f"{100 * math.expm1(loss(result) - loss(ours)):+.2f} %" if same_original(result, ours) else ""


def gain(result: Result, ours: Result) -> float:
    """How much lower the logarithm of the perplexity of a row is than that of ours."""
    shown = re.match(r"[+-][0-9.]+", against(result, ours)) if is_published(result) else None
    return loss(ours) - loss(result) if shown is None else -math.log1p(float(shown[0]) / 100)


def percent(values: Sequence[float], reference: Sequence[float]) -> str:
    """How much larger perplexity is, in percent, with the standard error of the paired difference."""
    gaps = [a - b for a, b in zip(values, reference, strict=True)]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return f"{100 * math.expm1(mean(gaps)):+.2f} ± {100 * error:.2f} %"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
