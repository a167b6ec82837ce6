"""The metrics of requests: each follows its definition."""

from __future__ import annotations

import pytest

from aiakq.bench.client import Timing
from aiakq.bench.request_metrics import measure


def timing(sent: float, arrivals: list[float], tokens: int) -> Timing:
    return Timing(sent, sent, arrivals[-1], arrivals, input_tokens=10, output_tokens=tokens, finish_reason="length")


def test_only_tokens_that_arrive_in_the_window_count():
    inside, across = timing(5.0, [5.1, 5.2], 2), timing(4.0, [4.5, 5.5, 6.5, 7.5], 8)
    found = measure([inside, across], 1.0, {}, (5.0, 6.0))
    assert (found["completed"], found["total_output_tokens"]) == (1, 2 + 8 / 4)


def test_the_share_of_good_requests():
    found = measure([timing(0.0, [0.1, 0.2], 2), timing(0.0, [0.4, 0.5], 2)], 1.0, {"ttft": 200.0})
    assert (found["goodput_share"], found["request_goodput"]) == (0.5, 1.0)


def test_measures_follow_their_definitions():
    timings = [timing(5.0, [5.5, 5.7, 6.1], 3), timing(6.0, [6.25], 1)]
    found = measure(timings, 2.0, {"ttft": 300.0})
    assert found["ttft_ms"]["mean"] == pytest.approx(375)
    assert found["tpot_ms"]["mean"] == pytest.approx(300)  # the answer of one token has none
    assert found["itl_ms"]["mean"] == pytest.approx(300)
    assert found["e2el_ms"]["max"] == pytest.approx(1100)
    assert found["request_goodput"] == pytest.approx(0.5)
    assert found["total_token_throughput"] == pytest.approx(12.0)
    assert found["max_concurrent_requests"] == 2
    assert found["max_output_tokens_per_s"] == pytest.approx(2.0)  # two before 6.0, two after


def test_each_limit_has_its_own_share():
    timings = [timing(0.0, [0.1, 0.2], 2), timing(0.0, [0.4, 0.5], 2)]
    found = measure(timings, 1.0, {"ttft": 200.0, "tpot": 150.0})
    assert found["goodput_shares"] == {"ttft": 0.5, "tpot": 1.0, "e2el": None}
