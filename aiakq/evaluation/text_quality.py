"""Figures of a text, with confidence intervals: of one model, of a model and its original, of two quantized models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from aiakq.evaluation.intervals import Interval, Resamples, quantile
from aiakq.evaluation.metrics import Comparison, Perplexity
from aiakq.evaluation.text import EvaluationText
from aiakq.evaluation.wording import BETTER, MIXED, SAME, WORSE, perplexity_remark
from aiakq.evaluation.worst import described


def perplexity_document(text: EvaluationText, measured: Perplexity) -> dict[str, Any]:
    """Return the figures of a model without its original as JSON values."""
    resamples = _resamples(measured.loss)
    figures = {"perplexity": measured.value, "tokens": measured.tokens}
    interval = _exp(resamples.mean(measured.loss))
    return {**_about(text, resamples), **figures, "perplexity_interval": _bounds(interval)}


def comparison_document(text: EvaluationText, compared: Comparison, tokenizer: object) -> dict[str, Any]:
    """Return the figures of a model and its original as JSON values."""
    scores = compared.scores
    resamples = _resamples(scores.kl)
    document: dict[str, Any] = {
        **_about(text, resamples),
        "perplexity": compared.perplexity,
        "perplexity_interval": _bounds(_exp(resamples.mean(scores.loss))),
        "perplexity_original": compared.perplexity_original,
        "perplexity_ratio": compared.perplexity / compared.perplexity_original,
        "perplexity_ratio_interval": _bounds(_exp(resamples.mean(scores.loss - scores.loss_original))),
        "kl": compared.kl,
        "kl_interval": _bounds(resamples.mean(scores.kl)),
        "kl_median": quantile(scores.kl, 0.5),
        "kl_p99": quantile(scores.kl, 0.99),
        "kl_p99_interval": _bounds(resamples.quantile(scores.kl, 0.99)),
        "kl_p999": quantile(scores.kl, 0.999),
        "kl_max": float(scores.kl.max()),
        "kl_max_interval": _bounds(resamples.maximum(scores.kl)),
        "top1_agreement": compared.top1_agreement,
        "top1_agreement_interval": _bounds(resamples.mean(scores.same)),
        "tokens": compared.tokens,
        "worst_tokens": [described(each, tokenizer) for each in compared.worst],
    }
    return {**document, "remark": perplexity_remark(document)}


def paired_document(text: EvaluationText, model: Comparison, other: Comparison) -> dict[str, Any]:
    """Return the difference of two models of the same original as JSON values; negative if ``model`` is closer to it.

    Differences are paired: both models predict the same tokens, and what is hard about a text cancels out.
    """
    ours, theirs = model.scores, other.scores
    resamples = _resamples(ours.kl)
    difference, change = ours.kl - theirs.kl, ours.loss - theirs.loss
    interval = resamples.mean(difference)
    return {
        "text": text.name,
        "kl": model.kl,
        "kl_versus": other.kl,
        "kl_difference": model.kl - other.kl,
        "kl_difference_interval": _bounds(interval),
        "kl_ratio": model.kl / other.kl if other.kl else None,
        "kl_ratio_interval": _bounds(resamples.ratio(ours.kl, theirs.kl)),
        "perplexity_ratio": model.perplexity / other.perplexity,
        "perplexity_ratio_interval": _bounds(_exp(resamples.mean(change))),
        "top1_difference": model.top1_agreement - other.top1_agreement,
        "top1_difference_interval": _bounds(resamples.mean(ours.same - theirs.same)),
        "verdict": verdict(interval, model.kl, other.kl),
    }


def verdict(difference: Interval | None, kl: float = 0.0, other: float = 0.0) -> str:
    """Return the verdict on a model with divergence ``kl``, which minus the ``other`` one's has this interval.

    A divergence that is not finite is worse than one that is, and has no interval.
    """
    if math.isfinite(kl) != math.isfinite(other):
        return BETTER if math.isfinite(kl) else WORSE
    if difference is None or not difference.excludes(0.0):
        return SAME
    return BETTER if difference.high < 0 else WORSE


def overall(verdicts: Sequence[str]) -> str:
    """Return the verdict over all texts: one that is better on a text and worse on none is better."""
    found = set(verdicts) - {SAME}
    return SAME if not found else MIXED if len(found) > 1 else found.pop()


def _about(text: EvaluationText, resamples: Resamples) -> dict[str, Any]:
    count, length = text.windows.shape
    blocks = {"blocks": resamples.blocks, "block_tokens": resamples.block_length}
    return {"name": text.name, "text": text.title, "windows": count, "seqlen": length, **blocks}


def _resamples(values: Tensor) -> Resamples:
    return Resamples(*values.shape)


def _exp(interval: Interval | None) -> Interval | None:
    if interval is None or interval.high > 700:
        return None
    return Interval(math.exp(interval.low), math.exp(interval.high))


def _bounds(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else {"low": interval.low, "high": interval.high}
