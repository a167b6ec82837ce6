"""Clients of very different appetite share an engine: whoever wants more gets its part, and nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter

import planted
import pytest
from clients import Violation
from fairness_checks import FairnessChecks
from model import VOCAB
from sizes import Setup
from world import World

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.client_shares import OUTPUT_WEIGHT
from aiakq.runtime.engine.step_builder import QUANTUM
from aiakq.runtime.protocol.sampling_params import SamplingParams

SEEDS = range(6)
#: How many requests each client has at a time, and the longest of its prompts and outputs.
APPETITES = {"c0": (10, 150, 10), "c1": (3, 150, 2), "c2": (2, 4, 60)}


class Appetites(World):
    """Clients that send a request as soon as one of theirs ends. ``served``: what each got, weighted."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        config = SchedulerConfig(
            max_num_seqs=draw.choice([4, 8, 16]),
            max_num_batched_tokens=draw.choice([32, 48, 64]),
            max_num_partial_prefills=draw.choice([1, 2]),
            max_long_partial_prefills=1,
        )
        pages = draw.choice([120, 400])
        super().__init__(Setup(4, pages, 224, False, seed % 2 == 1, config, 99, 1.0, 0.0, 0.0, owners=len(APPETITES)))
        self.served: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        # One after the other, so that some have been served for long when others come.
        for step in range(steps):
            inbox = []
            for index, (client, (most, prompt, outputs)) in enumerate(APPETITES.items()):
                has = sum(one.spec.options.client == client for one in self.live.values())
                if step >= 20 * index and has < most:
                    inbox += self._request(client, prompt, outputs)
            self.step(inbox, None)
            self.now += 0.01 + 0.001 * sum(chunk.count for chunk in self.scheduled)
            for chunk in self.scheduled:
                answers = chunk.count == 1 and chunk.completes
                self.served[chunk.sequence.client] += OUTPUT_WEIGHT if answers else chunk.count

    def _request(self, client: str, prompt: int, outputs: int):
        tokens = [self.draw.randrange(VOCAB) for _ in range(self.draw.randint(max(1, prompt // 2), prompt))]
        params = SamplingParams(max_tokens=self.draw.randint(1, outputs), seed=1, ignore_eos=True)
        return self.ask(tokens, params, owner=client)


def first_violation() -> str | None:
    for seed in SEEDS:
        try:
            Appetites(seed).run(400)
        except Violation as failure:
            return f"seed {seed}: {failure}"
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_client_with_few_requests_gets_its_share(seed):
    world = Appetites(seed)
    world.run(60)
    world.served.clear()
    world.run(600)
    # Between two requests it may want little for a step: the share is not exact.
    assert world.served["c1"] > 0.7 * world.served["c0"], world.served
    assert world.served["c2"] > 0
    world.finish()


def test_the_scheduler_violates_no_fairness_invariant():
    assert first_violation() is None


@pytest.mark.parametrize("bug", planted.UNFAIR, ids=lambda bug: bug.__name__)
def test_a_planted_unfairness_is_found(bug, monkeypatch):
    bug(monkeypatch.setattr)
    assert first_violation() is not None


def test_the_bound_is_small(monkeypatch):
    """The bound that is checked is one that matters: the worlds come near it."""
    worst = 0
    real = FairnessChecks.check

    def check(self, *args) -> None:
        nonlocal worst
        real(self, *args)
        worst = max(worst, *self.behind.values(), 0)

    monkeypatch.setattr(FairnessChecks, "check", check)
    assert first_violation() is None
    assert QUANTUM / 2 < worst
