"""When a load ends before its time."""

from __future__ import annotations

import heapq
import random

import pytest

from aiakq.bench.stopping import StopRule


def simulate(rate: float, seconds: float, servers: int, service: float, seed: int) -> StopRule:
    """A queue with Poisson arrivals, ``servers`` servers and exponential service times around ``service``."""
    rng, rule = random.Random(seed), StopRule(on_overload=True)
    free, events, now = [0.0] * servers, [], 0.0
    while now < seconds:
        now += rng.expovariate(rate)
        begin = max(now, heapq.heappop(free))
        end = begin + service * rng.uniform(0.8, 1.2)
        heapq.heappush(free, end)
        events += [(now, 0.0, False), (end, end - now, True)]
    for moment, latency, ended in sorted(events):
        if moment < seconds and rule.reason is None:
            rule.ended(moment, latency, False) if ended else rule.due(moment)
    return rule


@pytest.mark.parametrize("seed", range(5))
def test_a_server_that_falls_behind_ends_the_load(seed):
    assert "fell behind" in (simulate(14.0, 60.0, 10, 1.0, seed).reason or "")


@pytest.mark.parametrize("seed", range(20))
def test_a_server_that_keeps_up_does_not(seed):
    assert simulate(8.0, 60.0, 10, 1.0, seed).reason is None
    assert simulate(100.0, 30.0, 300, 2.0, seed).reason is None  # in flight: 200 of them


def test_max_errors_end_the_run_once():
    stops: list[int] = []
    rule = StopRule(max_errors=2)
    rule.on_stop = lambda: stops.append(1)
    for failed in (True, False, True, True):
        rule.ended(1.0, 0.1, failed)
    assert rule.reason == "2 requests failed (--max-errors)" and stops == [1]


def test_without_rules_nothing_ends_it():
    rule = StopRule()
    for _ in range(100):
        rule.due(100.0)
        rule.ended(100.0, 0.1, True)
    assert rule.reason is None
