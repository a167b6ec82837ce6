"""Clients with very different loads share an engine: each gets its share, and no request starves."""

from __future__ import annotations

import random
from collections import Counter

import planted_bugs
import pytest
from fairness_checks import FairnessChecks
from simulated_model import VOCAB
from simulation import Simulation
from simulation_config import SimulationConfig
from tracked_requests import Violation

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.client_shares import OUTPUT_WEIGHT
from aiakq.runtime.engine.step_builder import QUANTUM
from aiakq.runtime.protocol.sampling_params import SamplingParams

SEEDS = range(6)
#: By client: its requests at a time, and the maximum lengths of its prompts and outputs.
CLIENT_LOADS = {"c0": (10, 150, 10), "c1": (3, 150, 2), "c2": (2, 4, 60)}


class UnevenClients(Simulation):
    """Clients that replace each finished request with a new one.

    served  weighted tokens of each client.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        config = SchedulerConfig(
            max_num_seqs=rng.choice([4, 8, 16]),
            max_num_batched_tokens=rng.choice([32, 48, 64]),
            max_num_partial_prefills=rng.choice([1, 2]),
            max_long_partial_prefills=1,
        )
        pages = rng.choice([120, 400])
        super().__init__(
            SimulationConfig(
                page_size=4,
                num_pages=pages,
                max_len=224,
                caching=False,
                async_scheduling=seed % 2 == 1,
                scheduler=config,
                num_clients=len(CLIENT_LOADS),
            )
        )
        self.served: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        # Clients start one after the other, so that some have been served for long when others arrive.
        for step in range(steps):
            inbox = []
            for index, (client, (max_requests, max_prompt, max_output)) in enumerate(CLIENT_LOADS.items()):
                has = sum(one.spec.options.client == client for one in self.unfinished.values())
                if step >= 20 * index and has < max_requests:
                    inbox += self._request(client, max_prompt, max_output)
            self.step(inbox, None)
            self.now += 0.01 + 0.001 * sum(chunk.count for chunk in self.scheduled)
            for chunk in self.scheduled:
                is_decode = chunk.count == 1 and chunk.completes
                self.served[chunk.sequence.client] += OUTPUT_WEIGHT if is_decode else chunk.count

    def _request(self, client: str, max_prompt: int, max_output: int):
        tokens = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(max(1, max_prompt // 2), max_prompt))]
        params = SamplingParams(max_tokens=self.rng.randint(1, max_output), seed=1, ignore_eos=True)
        return self.add_request(tokens, params, client=client)


def first_violation() -> str | None:
    for seed in SEEDS:
        try:
            UnevenClients(seed).run(400)
        except Violation as failure:
            return f"seed {seed}: {failure}"
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_client_with_few_requests_gets_its_share(seed):
    simulation = UnevenClients(seed)
    simulation.run(60)
    simulation.served.clear()
    simulation.run(600)
    # The share is not exact: between two requests the client needs little for a step.
    assert simulation.served["c1"] > 0.7 * simulation.served["c0"], simulation.served
    assert simulation.served["c2"] > 0
    simulation.finish()


def test_the_scheduler_violates_no_fairness_invariant():
    assert first_violation() is None


@pytest.mark.parametrize("bug", planted_bugs.UNFAIR_BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_unfair_scheduler_is_found(bug, monkeypatch):
    bug(monkeypatch.setattr)
    assert first_violation() is not None


def test_the_fairness_bound_is_tight(monkeypatch):
    """Simulations come near the bound that is checked, so it is not too loose."""
    worst = 0
    real = FairnessChecks.check

    def check(self, *args) -> None:
        nonlocal worst
        real(self, *args)
        worst = max(worst, *self.deficits.values(), 0)

    monkeypatch.setattr(FairnessChecks, "check", check)
    assert first_violation() is None
    assert QUANTUM / 2 < worst
