"""Statistics of comparisons: known quantiles, coverage of intervals, verdicts, error rates of repeated analyses."""

from __future__ import annotations

import math
import random

import pytest

from aiakq.bench.comparison.statistics import (
    Estimate,
    Ratio,
    SequentialPlan,
    of_mean,
    of_quantile,
    of_runs,
    paired_ratio,
    ratio,
    student_t,
    with_noise,
)


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [
        # Tables of Student's distribution.
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 5, 2.57058),
        (0.995, 3, 5.84091),
        (0.9995, 7, 5.40788),
        (0.975, 30, 2.04227),
        (0.975, 1000, 1.96234),
        (0.975, math.inf, 1.95996),
        (0.5, 4, 0.0),
        (0.025, 5, -2.57058),
    ],
)
def test_quantiles_of_students_distribution(probability, freedom, value):
    assert student_t(probability, freedom) == pytest.approx(value, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("low", "high", "lower_is_better", "higher_is_better"),
    [
        (1.03, 1.08, "worse", "better"),
        (0.90, 0.95, "better", "worse"),
        (0.99, 1.01, "equal", "equal"),
        (0.95, 1.01, "not worse", "undecided"),
        (1.01, 1.05, "undecided", "not worse"),
        (0.90, 1.10, "undecided", "undecided"),
        (None, None, "undecided", "undecided"),
    ],
)
def test_verdicts_at_a_margin_of_2_percent(low, high, lower_is_better, higher_is_better):
    found = Ratio(1.0, low, high)
    assert found.verdict(0.02) == lower_is_better
    assert found.verdict(0.02, higher_is_better=True) == higher_is_better


def test_a_margin_is_the_same_ratio_in_both_directions():
    assert Ratio(1.0, 1 / 1.02, 1.02).verdict(0.02) == "equal"
    assert Ratio(1.0, 1 / 1.02, 1.02).verdict(0.02, higher_is_better=True) == "equal"


def coverage(interval, truth: float, runs: int = 400) -> float:
    draws = random.Random(5)
    hits = 0
    for _ in range(runs):
        found = interval(draws)
        hits += found.low <= truth <= found.high
    return hits / runs


def test_intervals_of_independent_runs_hold_what_they_promise():
    def interval(draws):
        base = of_runs([10 * math.exp(draws.gauss(0, 0.02)) for _ in range(4)])
        new = of_runs([11 * math.exp(draws.gauss(0, 0.05)) for _ in range(7)])
        return ratio(base, new)

    assert 0.925 <= coverage(interval, 1.1) <= 0.975


def test_intervals_of_rounds_hold_what_they_promise():
    assert 0.925 <= coverage(lambda d: paired_ratio([d.gauss(0.05, 0.01) for _ in range(5)]), math.exp(0.05)) <= 0.975


@pytest.mark.parametrize("rank", [50, 90])
def test_intervals_of_percentiles_of_requests_hold_what_they_promise(rank):
    def interval(draws):
        sides = []
        for scale in (1.0, 2.0):
            samples = sorted(scale * draws.lognormvariate(0, 0.5) for _ in range(200))
            sides.append(of_quantile(samples, samples[int(200 * rank / 100)], rank))
        return ratio(*sides)

    assert 0.925 <= coverage(interval, 2.0, 300) <= 0.995


def test_a_percentile_of_few_requests_has_no_interval():
    assert of_quantile([1.0, 2.0, 3.0, 4.0], 4.0, 99).error is None
    assert ratio(of_quantile([1.0, 2.0], 1.5, 50), of_mean(1.5, 0.1, 50)).low is None


def test_one_run_has_no_interval_unless_its_noise_is_known():
    one, other = of_runs([10.0]), of_runs([10.5])
    assert ratio(one, other) == Ratio(1.05, None, None)
    found = ratio(with_noise(one, 0.01), with_noise(other, 0.01))
    assert math.log(found.high / found.low) / 2 == pytest.approx(1.96 * 0.01 * math.sqrt(2), rel=1e-3)


def test_noise_widens_an_interval_over_requests_and_leaves_one_over_runs():
    requests, runs = of_mean(10.0, 1.0, 100), of_runs([10.0, 10.2])
    assert with_noise(requests, 0.05).error == pytest.approx(math.hypot(0.01, 0.05))
    assert with_noise(runs, 0.05) == runs
    assert with_noise(Estimate(3.0), 0) == Estimate(3.0)


def test_analyses_end_at_the_last_round_and_split_alpha():
    plan = SequentialPlan(min_rounds=4, max_rounds=16, metrics=3, alpha=0.05)
    assert plan.analyses == [4, 5, 6, 8, 10, 13, 16]
    assert plan.alpha_per_analysis == pytest.approx(0.05 / 21)
    assert SequentialPlan(6, 6, 1, 0.05).analyses == [6]


def decide(plan: SequentialPlan, effect: float, deviation: float, draws: random.Random) -> tuple[str, int]:
    logs: list[float] = []
    for count in range(1, plan.max_rounds + 1):
        logs.append(draws.gauss(effect, deviation))
        if count in plan.analyses:
            verdict = paired_ratio(logs, plan.alpha_per_analysis).verdict(0.02)
            if verdict != "undecided":
                return verdict, count
    return "undecided", plan.max_rounds


def test_repeated_analyses_raise_no_false_alarms():
    plan, draws = SequentialPlan(4, 50, 3, 0.05), random.Random(7)
    # At the margin itself, the worst case, an alarm is still an error.
    verdicts = [decide(plan, math.log(1.02), 0.02, draws)[0] for _ in range(400)]
    assert verdicts.count("worse") / 400 <= 0.05 / 3
    same = [decide(plan, 0.0, 0.02, draws)[0] for _ in range(400)]
    assert same.count("worse") == 0


def test_five_percent_are_found_soon():
    plan, draws = SequentialPlan(4, 50, 3, 0.05), random.Random(8)
    found = [decide(plan, math.log(1.05), 0.01, draws) for _ in range(200)]
    assert {verdict for verdict, _ in found} == {"worse"}
    assert sum(count for _, count in found) / 200 < 10
