"""The environment variable that sets how threads wait."""

from __future__ import annotations

import pytest

from aiakq.system.threads import SPIN_COUNT, spin_briefly


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "passive"}, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_threads_spin_briefly_unless_the_user_says_how(before, after):
    spin_briefly(before)
    assert before == after
