"""The simulator finds no violation in the engine, and finds every planted bug with the same seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import planted_bugs
import planted_draft_bugs
import pytest
import simulator
from simulator import SeededSimulation
from tracked_requests import Totals, Violation

SEEDS = range(60)
STEPS = 150


def first_violation(totals: Totals, num_clients: int | None = None) -> str | None:
    """Return the message of the first simulation of SEEDS that fails."""
    for seed in SEEDS:
        try:
            SeededSimulation(seed, totals=totals, num_clients=num_clients).run(STEPS)
        except Violation as failure:
            return f"seed {seed}: {failure}"
    return None


def test_no_invariant_is_violated_and_every_event_occurs():
    totals = Totals()
    assert first_violation(totals) is None
    assert sum(totals.faults.values()) > 0.05 * totals.steps, "faults in more than 5 % of the steps"
    assert totals.preemptions > 50 and totals.cached > 1000 and totals.columns > 1000
    assert totals.drafts > totals.accepted > 100
    assert all(totals.faults[kind] > 10 for kind in simulator.FAULT_KINDS)
    assert all(totals.finish_reasons[reason] > 20 for reason in ("stop", "length", "abort", "error", "engine ended"))


@pytest.mark.parametrize("bug", [*planted_bugs.BUGS, *planted_draft_bugs.BUGS], ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug, monkeypatch):
    bug(monkeypatch.setattr)
    totals = Totals()
    assert first_violation(totals) is not None, f"not in {totals.steps} steps"


@pytest.mark.parametrize("num_clients", [2, 4])
def test_no_invariant_is_violated_with_several_clients(num_clients):
    totals = Totals()
    assert first_violation(totals, num_clients) is None
    assert totals.preemptions > 50 and totals.tokens > 1000


def test_a_seed_determines_the_simulation():
    def traces() -> list[int]:
        simulations = [SeededSimulation(seed) for seed in range(20)]
        for simulation in simulations:
            simulation.run(100)
        return [simulation.trace for simulation in simulations]

    assert traces() == traces()


def test_a_failing_simulation_is_minimized_and_still_fails(monkeypatch):
    planted_bugs.abort_leaks_pages(monkeypatch.setattr)
    seed = next(seed for seed in SEEDS if simulator.violation(seed, STEPS))
    steps, without, message = simulator.minimized(seed, STEPS)
    assert without and "aborts" not in without, "the bug needs an abort"
    assert simulator.violation(seed, steps, without) == (steps, message)
    assert f"--seed {seed} --steps {steps} --without" in simulator.command_line(seed, steps, without)


def test_the_simulator_runs_as_a_program():
    command = [sys.executable, str(Path(simulator.__file__)), "--seed", "3", "--steps", "40"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "in 1 simulations" in done.stdout
