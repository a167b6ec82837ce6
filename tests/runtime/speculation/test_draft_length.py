"""Draft lengths follow from the time of steps and the acceptance of sequences."""

from __future__ import annotations

import itertools
import random

import pytest

from aiakq.runtime.speculation.draft_length import DEFAULT_COSTS, AcceptanceRate, StepCosts, choose_lengths

#: Reading weights takes the time of 5 tokens.
MEMORY_BOUND = StepCosts({1: 6.0, 16: 21.0})
COMPUTE_BOUND = StepCosts({1: 1.0, 2: 2.0})


def test_times_are_interpolated_and_extrapolated():
    costs = StepCosts({1: 1.0, 2: 1.5, 4: 2.5, 8: 4.5})
    assert [costs.step(tokens) for tokens in (1, 2, 3, 6, 8, 16)] == [1.0, 1.5, 2.0, 3.5, 4.5, 8.5]


def test_a_step_may_be_faster_than_a_smaller_one_but_not_than_one_of_one_token():
    """Kernels compute several rows at a time: in steps of the example model 4 tokens take less time than 3."""
    costs = StepCosts({1: 1.0, 2: 0.9, 3: 1.7, 4: 1.3, 8: 2.5})
    assert [costs.step(tokens) for tokens in (2, 3, 4)] == [1.0, 1.7, 1.3]
    assert choose_lengths(costs, 1, 1, [0.6], [4], 99) == [3]
    assert costs.step(16) == pytest.approx(2.5 + 8 * 1.2 / 4), "beyond, as between the half and all of what is known"


def test_a_single_measurement_is_taken_for_all():
    assert StepCosts({1: 2.0}).step(9) == 2.0
    with pytest.raises(ValueError, match="one token"):
        StepCosts({2: 1.0})


@pytest.mark.parametrize(
    ("rates", "lengths"),
    [([0.95], [8]), ([0.6], [2]), ([0.3], [1]), ([0.1], [0]), ([0.95, 0.1], [8, 0]), ([0.1, 0.1], [0, 0]), ([], [])],
)
def test_lengths_grow_with_acceptance(rates, lengths):
    assert choose_lengths(MEMORY_BOUND, max(1, len(rates)), max(1, len(rates)), rates, [8] * len(rates), 99) == lengths


def test_nothing_is_drafted_where_every_token_takes_its_time():
    assert choose_lengths(COMPUTE_BOUND, 4, 4, [0.98] * 4, [5] * 4, 99) == [0, 0, 0, 0]
    assert COMPUTE_BOUND.min_acceptance(4, 4, 3) == 1.0
    assert COMPUTE_BOUND.min_acceptance(4, 0, 3) == 1.0, "a step without decodes has no draft tokens"


def test_larger_batches_get_shorter_drafts():
    total = [sum(choose_lengths(DEFAULT_COSTS, n, n, [0.6] * n, [4] * n, 99)) / n for n in (1, 4, 16, 64)]
    assert total == sorted(total, reverse=True) and total[0] > 1 and total[-1] < 1


def test_limits_of_sequences_and_of_the_step_are_kept():
    assert choose_lengths(MEMORY_BOUND, 2, 2, [0.9, 0.9], [1, 8], 5) == [1, 4]
    assert choose_lengths(MEMORY_BOUND, 2, 2, [0.9, 0.9], [0, 8], 0) == [0, 0]


def test_prompts_in_the_step_count_only_where_they_make_draft_tokens_dearer():
    assert choose_lengths(MEMORY_BOUND, 100, 1, [0.6], [8], 99) == [2]
    late = StepCosts({1: 1.0, 64: 1.0, 128: 20.0})  # draft tokens are free, but not behind 64 others
    assert choose_lengths(late, 1, 1, [0.2], [4], 99) == [4] and choose_lengths(late, 100, 1, [0.2], [4], 99) == [0]


def test_a_draft_model_shortens_drafts_by_its_time():
    costs = StepCosts({1: 1.0, 16: 1.0}, draft_seconds=0.34)
    assert choose_lengths(costs, 1, 1, [0.9], [16], 99) == [16]
    with_model = choose_lengths(costs, 1, 1, [0.9], [16], 99, with_proposals=True)
    assert 2 <= with_model[0] <= 5
    assert choose_lengths(costs, 1, 1, [0.2], [16], 99, with_proposals=True) == [0]


def test_lengths_are_the_best_of_all():
    draw = random.Random(0)
    for _ in range(30):
        rates, limits = [draw.random() * 0.98 for _ in range(3)], [draw.randrange(4) for _ in range(3)]
        seconds, times = 1.0, {}
        for tokens in range(1, 14):
            times[tokens] = seconds
            seconds += draw.random() * 0.2
        costs = StepCosts(times)

        def speed(lengths, rates=rates, costs=costs):
            expected = 3 + sum(sum(rate**at for at in range(1, n + 1)) for rate, n in zip(rates, lengths, strict=True))
            return expected / costs.step(3 + sum(lengths))

        best = max(speed(lengths) for lengths in itertools.product(*(range(limit + 1) for limit in limits)))
        assert speed(choose_lengths(costs, 3, 3, rates, limits, 99)) == pytest.approx(best)


def test_acceptance_follows_what_is_observed():
    rate = AcceptanceRate()
    for _ in range(30):
        rate.observe(4, 4)
    assert rate.value > 0.95
    for _ in range(8):
        rate.observe(1, 0)
    assert rate.value < 0.5
    for _ in range(60):
        rate.observe(4, 1)  # a rejected token after an accepted one; those behind it say nothing
    assert rate.value == pytest.approx(0.5, abs=0.01)


def test_bookkeeping_counts_once_for_a_sequence_with_draft_tokens():
    free = StepCosts({1: 1.0, 16: 1.0})
    assert free.min_acceptance(1, 1, 4) == 0.01
    costs = free.with_bookkeeping(1.0, 1.0)
    assert costs.step(1) == 2.0 and costs.bookkeeping == 1.0
    # A step of 2 takes 3 with draft tokens: one is not worth it unless half are accepted, four are earlier.
    assert costs.min_acceptance(1, 1, 1) == 0.51
    assert 0.3 < costs.min_acceptance(1, 1, 4) < 0.4
    assert choose_lengths(costs, 2, 2, [0.3, 0.9], [4, 4], 8) == [0, 4]
