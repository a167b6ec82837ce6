"""Arrivals: rates, burstiness, ramps."""

from __future__ import annotations

import random
import statistics

import pytest

from aiakq.bench.arrivals import Ramp, arrival_times


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 20.0])
def test_arrivals_end_at_count_over_rate(burstiness):
    times = arrival_times(200, 50.0, burstiness, random.Random(0))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4.0)


def test_burstiness_shapes_the_gaps():
    """The coefficient of variation of gamma gaps is 1 / sqrt(shape)."""

    def variation(burstiness):
        times = arrival_times(4000, 100.0, burstiness, random.Random(1))
        gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
        return statistics.pstdev(gaps) / statistics.fmean(gaps)

    assert variation(1.0) == pytest.approx(1.0, rel=0.1)
    assert variation(0.25) == pytest.approx(2.0, rel=0.15)
    assert variation(100.0) == pytest.approx(0.1, rel=0.1)


def test_an_infinite_rate_sends_all_at_once():
    assert arrival_times(3, float("inf"), 1.0, random.Random(0)) == [0.0, 0.0, 0.0]


def test_infinite_burstiness_is_a_constant_rate():
    assert arrival_times(4, 2.0, float("inf"), random.Random(0)) == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_its_first_rate_to_its_last(strategy):
    times = arrival_times(101, 99.0, float("inf"), random.Random(0), Ramp(strategy, 2.0, 50.0))
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert times[0] == pytest.approx(1 / 2) and gaps[-1] == pytest.approx(1 / 50)
    assert gaps == sorted(gaps, reverse=True)
    assert 1 / gaps[49] == pytest.approx(26.0 if strategy == "linear" else 10.0, rel=0.02)


def test_chance_does_not_change_when_a_ramp_ends():
    ramp = Ramp("linear", 1.0, 10.0)
    steady = arrival_times(50, 1.0, float("inf"), random.Random(0), ramp)
    assert arrival_times(50, 1.0, 1.0, random.Random(3), ramp)[-1] == pytest.approx(steady[-1])
