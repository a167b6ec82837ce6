"""Statistics against numpy, and summaries without measurements."""

from __future__ import annotations

import random

import numpy
import pytest

from aiakq.bench.summary import PERCENTILES, milliseconds, percentile, rate, summarize


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_summary_agrees_with_numpy(count):
    values = [random.Random(count).expovariate(1.0) for _ in range(count)]
    found = summarize(values)
    expected = {
        "mean": numpy.mean(values),
        "median": numpy.median(values),
        "std": numpy.std(values),
        "min": min(values),
        "max": max(values),
        **{f"p{rank}": numpy.percentile(values, rank) for rank in PERCENTILES},
    }
    assert found == pytest.approx(expected)


def test_percentile_interpolates_between_two_values():
    assert percentile([10.0, 20.0], 25) == 12.5
    assert percentile([10.0, 20.0], 0) == 10.0
    assert percentile([10.0, 20.0], 100) == 20.0


def test_nothing_measured_is_none_under_the_same_keys():
    assert summarize([]).keys() == summarize([1.0]).keys()
    assert set(summarize([]).values()) == {None}
    assert rate(5, 0.0) is None
    assert rate(5, 2.0) == 2.5


def test_milliseconds_writes_nested_and_flat_keys():
    keys = milliseconds("ttft", [0.1, 0.3])
    assert keys["ttft_ms"]["mean"] == pytest.approx(200)
    assert keys["mean_ttft_ms"] == pytest.approx(200)
    assert keys["median_ttft_ms"] == keys["p50_ttft_ms"] == keys["ttft_ms"]["p50"]
    assert keys["std_ttft_ms"] == pytest.approx(100)
    assert keys["p99_ttft_ms"] == pytest.approx(298)
