"""Statistics of comparisons: estimates with standard errors, intervals of ratios, verdicts, and when to look.

Everything is about ratios, so values are compared by their logarithms: a ratio of 1.05 is a difference of 0.049, and so
are 5 % more milliseconds and 5 % more bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

#: Verdicts. Not worse: better or equal, and the interval does not say which. Only worse and changed fail a gate.
BETTER, EQUAL, NOT_WORSE, WORSE, UNDECIDED = "better", "equal", "not worse", "worse", "undecided"
#: The numbers of rounds after which a comparison in alternation may end.
LOOKS = (4, 5, 6, 8, 10, 13, 17, 22, 29, 38, 50)


@dataclass(frozen=True)
class Estimate:
    """A measured value above 0 and how well it is known.

    error    standard error of its logarithm; None where one number is all there is.
    freedom  degrees of freedom of ``error``; infinite for errors from many requests.
    count    how many independent measurements it is made of.
    over     what those are: "runs", "requests", or "" where there is one.
    """

    value: float
    error: float | None = None
    freedom: float = math.inf
    count: int = 1
    over: str = ""


@dataclass(frozen=True)
class Ratio:
    """New divided by base. ``low`` and ``high`` bound it with the confidence asked for; None where nothing does."""

    value: float
    low: float | None
    high: float | None

    def verdict(self, margin: float, higher_is_better: bool = False) -> str:
        """What the interval says about a change of more than ``margin`` (0.02 is 2 %)."""
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
    """The geometric mean of the same value of several runs, which are independent of each other."""
    logs = [math.log(value) for value in values]
    if len(logs) < 2:
        return Estimate(values[0])
    return Estimate(math.exp(fmean(logs)), stdev(logs) / math.sqrt(len(logs)), len(logs) - 1, len(logs), "runs")


def of_mean(mean: float, deviation: float, count: int) -> Estimate:
    """A mean over ``count`` requests of one run, with their standard deviation."""
    if count < 2 or mean <= 0:
        return Estimate(mean)
    return Estimate(mean, deviation / mean / math.sqrt(count), count - 1, count, "requests")


def of_quantile(samples: Sequence[float], value: float, rank: float) -> Estimate:
    """``value``, the ``rank``-th percentile of ``samples`` of one run.

    Its error comes from the samples on both sides between which the true percentile lies in two of three cases
    (binomial; no assumption about the distribution). None where there are too few samples on one side.
    """
    count, share = len(samples), rank / 100
    spread = math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread) - 1, math.ceil(count * share + spread)
    if low < 0 or high >= count or value <= 0:
        return Estimate(value)
    ordered = sorted(samples)
    if ordered[low] <= 0:
        return Estimate(value)
    return Estimate(value, math.log(ordered[high] / ordered[low]) / 2, math.inf, count, "requests")


def with_noise(estimate: Estimate, noise: float) -> Estimate:
    """``estimate`` of a run that differs by a standard deviation of ``noise`` (0.02 is 2 %) from run to run."""
    if estimate.over == "runs" or noise == 0:
        return estimate
    error = math.hypot(estimate.error or 0.0, noise)
    return Estimate(estimate.value, error, math.inf, estimate.count, estimate.over)


def ratio(base: Estimate, new: Estimate, alpha: float = 0.05) -> Ratio:
    """New divided by base of two measurements that do not depend on each other (Welch)."""
    change = new.value / base.value
    if base.error is None or new.error is None:
        return Ratio(change, None, None)
    error = math.hypot(base.error, new.error)
    parts = sum(each.error**4 / each.freedom for each in (base, new) if each.error)
    freedom = error**4 / parts if parts else math.inf
    half = student_t(1 - alpha / 2, freedom) * error
    return Ratio(change, change * math.exp(-half), change * math.exp(half))


def paired_ratio(logs: Sequence[float], alpha: float = 0.05) -> Ratio:
    """The ratio of which ``logs`` are the logarithms, one of each independent round (Student)."""
    middle = fmean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(middle), None, None)
    half = student_t(1 - alpha / 2, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


@dataclass(frozen=True)
class SequentialPlan:
    """When a comparison in alternation is looked at, and how sure each look has to be.

    The chance of a wrong verdict is divided by the number of looks and of metrics (Bonferroni), so that ``alpha``
    bounds it for all of them together, however early the comparison ends.
    """

    min_rounds: int
    max_rounds: int
    metrics: int
    alpha: float

    @property
    def looks(self) -> list[int]:
        """The numbers of rounds after which the results are looked at."""
        later = [count for count in LOOKS if self.min_rounds < count < self.max_rounds]
        return sorted({self.min_rounds, *later, self.max_rounds})

    @property
    def alpha_of_look(self) -> float:
        """The chance of a wrong interval that one metric has at one look."""
        return self.alpha / len(self.looks) / max(1, self.metrics)


# --- Student's distribution ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def student_t(probability: float, freedom: float) -> float:
    """The value below which Student's distribution with ``freedom`` degrees lies with ``probability``."""
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
    """The chance of a value below ``t`` >= 0."""
    return 1 - 0.5 * _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Abramowitz and Stegun 26.5.8)."""
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
