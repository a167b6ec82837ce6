"""The engine under the simulator: nothing is violated, and every planted bug is found on the same seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import planted
import planted_drafts
import pytest
import simulator
from clients import Totals, Violation
from simulator import SeededWorld

SEEDS = range(60)
STEPS = 150


def first_violation(totals: Totals, owners: int | None = None) -> str | None:
    """What the first world of SEEDS that fails fails with."""
    for seed in SEEDS:
        try:
            SeededWorld(seed, totals=totals, owners=owners).run(STEPS)
        except Violation as failure:
            return f"seed {seed}: {failure}"
    return None


def test_nothing_is_violated_and_everything_happens():
    totals = Totals()
    assert first_violation(totals) is None
    assert sum(totals.faults.values()) > 0.05 * totals.steps, "faults in more than 5 % of the steps"
    assert totals.preemptions > 50 and totals.cached > 1000
    assert totals.drafts > totals.accepted > 100
    assert all(totals.faults[kind] > 10 for kind in simulator.KINDS)
    assert all(totals.ends[reason] > 20 for reason in ("stop", "length", "abort", "error", "engine ended"))


@pytest.mark.parametrize("bug", [*planted.BUGS, *planted_drafts.BUGS], ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug, monkeypatch):
    bug(monkeypatch.setattr)
    totals = Totals()
    assert first_violation(totals) is not None, f"not in {totals.steps} steps"


@pytest.mark.parametrize("owners", [2, 4])
def test_clients_share_the_engine(owners):
    totals = Totals()
    assert first_violation(totals, owners) is None
    assert totals.preemptions > 50 and totals.tokens > 1000


def test_a_world_repeats_itself():
    def traces() -> list[int]:
        worlds = [SeededWorld(seed) for seed in range(20)]
        for world in worlds:
            world.run(100)
        return [world.trace for world in worlds]

    assert traces() == traces()


def test_a_failing_world_is_made_smaller_and_still_fails(monkeypatch):
    planted.abort_leaks_pages(monkeypatch.setattr)
    seed = next(seed for seed in SEEDS if simulator.violation(seed, STEPS))
    steps, without, how = simulator.smallest(seed, STEPS)
    assert without and "aborts" not in without, "it takes an abort"
    assert simulator.violation(seed, steps, without) == (steps, how)
    assert f"--seed {seed} --steps {steps} --without" in simulator.line(seed, steps, without)


def test_it_is_a_program_of_its_own():
    command = [sys.executable, str(Path(simulator.__file__)), "--seed", "3", "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "in 1 worlds" in done.stdout
