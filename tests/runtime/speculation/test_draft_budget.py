"""The time that draft tokens may waste is bounded for any text; the bound does not limit what they save."""

from __future__ import annotations

import random

import pytest

from aiakq.runtime.speculation.draft_budget import DraftBudget


def lost(num_steps: int, is_accepted, cost: float = 0.7) -> float:
    """Seconds lost, less those saved, in ``num_steps`` of a second each, where every step that may verifies a token."""
    budget, seconds = DraftBudget(), 0.0
    for step in range(num_steps):
        budget.earn(1, 1.0, 1)
        if not budget.is_spent:
            accepted = int(is_accepted(step))
            budget.charge(cost)
            budget.credit(accepted)
            seconds += cost - accepted
    return seconds


@pytest.mark.parametrize("seed", range(5))
def test_the_time_that_is_lost_is_bounded_for_every_acceptance(seed):
    draw = random.Random(seed)
    rate = draw.random() * 0.7
    num_steps = draw.choice([300, 3000])
    assert lost(num_steps, lambda step: draw.random() < rate) <= 0.01 * num_steps + 4 + 0.7


def test_a_long_time_of_gains_does_not_pay_for_a_long_time_of_losses():
    gains = lost(1000, lambda step: step < 1000)
    both = lost(2000, lambda step: step < 1000)
    assert both - gains <= 0.01 * 1000 + 4 + 0.7


def test_draft_tokens_that_pay_are_never_held_up():
    draw = random.Random(0)
    assert lost(1000, lambda step: draw.random() < 0.9) < -150, "one second in five"


def test_it_is_known_when_it_is_no_longer_spent():
    budget = DraftBudget()
    assert not budget.is_spent and budget.num_steps_until_earned == 0
    budget.earn(1, 2.0, 4)
    budget.charge(8.0 + 0.5)
    steps = budget.num_steps_until_earned
    assert budget.is_spent and steps == 26
    budget.earn(steps - 1, 2.0, 4)
    assert budget.is_spent
    budget.earn(1, 2.0, 4)
    assert not budget.is_spent


def test_an_accepted_token_saves_its_share_of_a_step():
    budget = DraftBudget()
    budget.earn(1, 2.0, 4)
    budget.charge(9.0)
    budget.credit(1)
    assert budget.is_spent
    budget.credit(2)
    assert not budget.is_spent
