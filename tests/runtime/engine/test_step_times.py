"""Estimates of step times."""

from __future__ import annotations

import pytest

from aiakq.runtime.engine.step_times import StepTimes


def learned(*sizes: int, fixed: float = 0.02, each: float = 0.001) -> StepTimes:
    """After steps of these numbers of tokens, which take ``fixed`` seconds and ``each`` per token."""
    times = StepTimes()
    for size in sizes:
        times.observe(size, fixed + each * size)
    return times


def test_nothing_is_known_before_the_first_step():
    assert StepTimes().max_tokens(1, 3.0) is None


@pytest.mark.parametrize("sizes", [(1, 64, 128), (1, 16, 512), (32, 512), (1, 2, 4, 300)])
def test_steps_that_take_a_multiple_of_a_small_one(sizes):
    # 3 x (20 + 1) ms are those of 43 tokens.
    assert learned(*sizes).max_tokens(1, 3.0) == pytest.approx(43, abs=2)


def test_a_slow_first_step_does_not_make_longer_steps_seem_cheap():
    times = learned(1, 16, 32, 64, fixed=0.0)
    times.observe(3, 0.04)  # the first prompt, before anything was in the caches
    # 2 ms for two tokens, as twice one, and 2 ms more.
    assert times.max_tokens(2, 3.0) <= 4


def test_several_clients_add_up_once():
    """A step may take what a token for each of them does, and two of the shortest steps."""
    assert learned(1, 2, 4, 8, 16, 32, 64, fixed=0.0).max_tokens(8, 3.0) == pytest.approx(10, abs=1)


def test_larger_and_smaller_steps_than_any_are_found_step_by_step():
    assert learned(1, 8).max_tokens(1, 3.0) == 16
    assert learned(512).max_tokens(1, 3.0) == 128


def test_times_follow_what_happens_now_but_not_a_single_interruption():
    times = learned(1, 32, 64, 256)
    times.observe(1, 100.0)
    assert times.max_tokens(1, 3.0) < 128
    for _ in range(60):
        times.observe(1, 0.021)
        times.observe(32, 0.5)
    assert times.max_tokens(1, 3.0) < 8
