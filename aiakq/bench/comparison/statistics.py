"""Statistics of comparisons: estimates with standard errors, confidence intervals of ratios, verdicts, sequential plan.

Errors and intervals are those of logarithms, because changes are relative: a ratio of 1.05 is a difference of 0.049,
whatever the unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

#: Verdicts. "not worse" is better or equal where the interval does not tell which.
BETTER, EQUAL, NOT_WORSE, WORSE, UNDECIDED = "better", "equal", "not worse", "worse", "undecided"
#: Numbers of rounds after which ``bench ab`` runs an interim analysis and may stop.
ANALYSES = (4, 5, 6, 8, 10, 13, 17, 22, 29, 38, 50)


@dataclass(frozen=True)
class Estimate:
    """A positive measured value with its standard error.

    error    standard error of the logarithm of ``value``, or None if it is unknown.
    freedom  degrees of freedom of ``error``; infinite if it is known from many samples.
    count    number of samples.
    over     what a sample is: "runs", "requests", or "" for a single number.
    """

    value: float
    error: float | None = None
    freedom: float = math.inf
    count: int = 1
    over: str = ""


@dataclass(frozen=True)
class Ratio:
    """New divided by base. ``low`` and ``high`` are its confidence interval, or None if the errors are unknown."""

    value: float
    low: float | None
    high: float | None

    def verdict(self, margin: float, higher_is_better: bool = False) -> str:
        """Return the verdict on a change of more than ``margin`` (0.02 is 2 %), one of the constants above."""
        if self.low is None or self.high is None:
            return UNDECIDED
        low, high = (1 / self.high, 1 / self.low) if higher_is_better else (self.low, self.high)
        if low > 1 + margin:
            return WORSE
        if high < 1 / (1 + margin):
            return BETTER
        if high <= 1 + margin:
            return EQUAL if low >= 1 / (1 + margin) else NOT_WORSE
        return UNDECIDED


def of_runs(values: Sequence[float]) -> Estimate:
    """Return the geometric mean of a metric over independent runs."""
    logs = [math.log(value) for value in values]
    if len(logs) < 2:
        return Estimate(values[0])
    return Estimate(math.exp(fmean(logs)), stdev(logs) / math.sqrt(len(logs)), len(logs) - 1, len(logs), "runs")


def of_mean(mean: float, deviation: float, count: int) -> Estimate:
    """Return the estimate of a mean over ``count`` requests of one run with standard deviation ``deviation``."""
    if count < 2 or mean <= 0:
        return Estimate(mean)
    return Estimate(mean, deviation / mean / math.sqrt(count), count - 1, count, "requests")


def of_quantile(samples: Sequence[float], value: float, rank: float) -> Estimate:
    """Return the estimate of ``value``, the ``rank``-th percentile of ``samples`` of one run.

    Its error is half the width of the distribution-free (binomial) 68 % interval between order statistics, or None if
    there are too few samples for that.
    """
    count, fraction = len(samples), rank / 100
    spread = math.sqrt(count * fraction * (1 - fraction))
    low, high = math.floor(count * fraction - spread) - 1, math.ceil(count * fraction + spread)
    if low < 0 or high >= count or value <= 0:
        return Estimate(value)
    ordered = sorted(samples)
    if ordered[low] <= 0:
        return Estimate(value)
    return Estimate(value, math.log(ordered[high] / ordered[low]) / 2, math.inf, count, "requests")


def with_noise(estimate: Estimate, noise: float) -> Estimate:
    """Add a run-to-run standard deviation of ``noise`` (0.02 is 2 %) to an estimate from a single run."""
    if estimate.over == "runs" or noise == 0:
        return estimate
    error = math.hypot(estimate.error or 0.0, noise)
    return Estimate(estimate.value, error, math.inf, estimate.count, estimate.over)


def ratio(base: Estimate, new: Estimate, alpha: float = 0.05) -> Ratio:
    """Return new divided by base of two independent estimates, with Welch's interval at level ``1 - alpha``."""
    change = new.value / base.value
    if base.error is None or new.error is None:
        return Ratio(change, None, None)
    error = math.hypot(base.error, new.error)
    parts = sum(each.error**4 / each.freedom for each in (base, new) if each.error)
    freedom = error**4 / parts if parts else math.inf
    half = student_t(1 - alpha / 2, freedom) * error
    return Ratio(change, change * math.exp(-half), change * math.exp(half))


def paired_ratio(logs: Sequence[float], alpha: float = 0.05) -> Ratio:
    """Return the geometric mean of ratios with Student's interval at level ``1 - alpha``.

    logs  logarithms of the ratios, one per independent round.
    """
    middle = fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(middle), None, None)
    half = student_t(1 - alpha / 2, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


@dataclass(frozen=True)
class SequentialPlan:
    """Group-sequential plan of ``bench ab``: when to run an interim analysis, and at what significance level.

    ``alpha`` is divided by the numbers of analyses and metrics (Bonferroni), so it bounds the probability of any wrong
    verdict whenever the comparison stops.
    """

    min_rounds: int
    max_rounds: int
    metrics: int
    alpha: float

    @property
    def analyses(self) -> list[int]:
        """Numbers of rounds after which the results are analyzed, ascending."""
        later = [count for count in ANALYSES if self.min_rounds < count < self.max_rounds]
        return sorted({self.min_rounds, *later, self.max_rounds})

    @property
    def alpha_per_analysis(self) -> float:
        """Significance level of one metric at one analysis."""
        return self.alpha / len(self.analyses) / max(1, self.metrics)


# --- Student's distribution ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def student_t(probability: float, freedom: float) -> float:
    """Return the ``probability`` quantile of Student's t-distribution with ``freedom`` degrees of freedom."""
    if probability < 0.5:
        return -student_t(1 - probability, freedom)
    if freedom > 1e6:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while _cumulative(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if _cumulative(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _cumulative(t: float, freedom: float) -> float:
    """Return the cumulative distribution function of Student's t at ``t`` >= 0."""
    return 1 - 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularized incomplete beta function, by its continued fraction (Abramowitz and Stegun 26.5.8)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    scale = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    fraction = 1.0
    for step in range(100, 0, -1):
        half = step // 2
        if step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        fraction = 1 + term / fraction
    return scale / (a * fraction)
