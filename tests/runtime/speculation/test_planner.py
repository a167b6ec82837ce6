"""Draft tokens in the scheduler: scheduled within every limit, and only if they save time."""

from __future__ import annotations

import random

import pytest
from replay_proposer import FREE
from scheduler_configs import scheduler_config

from aiakq.runtime.build.features import new_scheduler
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.protocol.admission import admit
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import RequestTimes
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.speculation.config import SpeculationConfig
from aiakq.runtime.speculation.draft_length import StepCosts
from aiakq.runtime.speculation.planner import DraftPlanner

#: A step takes as long as it has tokens.
COMPUTE_BOUND = StepCosts({1: 1.0, 2: 2.0})


class Steps:
    """A scheduler whose sequences repeat themselves; ``right`` says whether they go on doing so."""

    def __init__(self, costs: StepCosts, count: int = 1, pages: int = 99, right: bool = True, **speculation) -> None:
        config = scheduler_config(speculation=SpeculationConfig(**speculation))
        self.scheduler = new_scheduler(config, PagePool(pages, 4, False))
        self.planner = self.scheduler.resource(DraftPlanner)
        self.planner.costs, self._right = costs, right
        self.sequences = []
        self._draw = random.Random(0)
        for number in range(count):
            params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
            spec = admit(str(number), [1, 2, 3] * 2, params, ModelLimits(300, 400, 400))
            self.sequences.append(Sequence(spec, RequestTimes(0.0)))
            self.scheduler.add(self.sequences[-1])

    def step(self) -> list[int]:
        """Run a step; returns the draft length of each sequence."""
        lengths = []
        for chunk in self.scheduler.schedule():
            sequence = chunk.sequence
            lengths.append(len(chunk.drafts))
            sequence.collected(chunk)
            accepted = len(chunk.drafts) if self._right else 0
            if chunk.drafts:
                self.planner.drafts_of(sequence).observe(len(chunk.drafts), accepted)
                chunk.accept(accepted)
            known = len(sequence.token_ids)
            for at in range(known, known + accepted + 1):
                sequence.token_ids.append(1 + at % 3 if self._right else self._draw.randrange(100, 120))
        return lengths


def test_drafts_grow_while_they_are_accepted():
    steps = Steps(FREE, num_speculative_tokens=6)
    lengths = [steps.step()[0] for _ in range(9)]
    assert lengths[0] == 0 and lengths[1] > 0 and lengths[-1] == 6


def test_nothing_is_verified_where_it_would_be_a_loss():
    """Row 33 of the complaints about other engines: slower with speculation than without."""
    steps = Steps(COMPUTE_BOUND)
    assert [steps.step() for _ in range(60)] == [[0]] * 60


def test_rejected_drafts_cost_few_steps():
    steps = Steps(StepCosts({1: 1.0, 16: 2.0}), right=False)
    assert sum(steps.step()[0] for _ in range(100)) <= 12


def test_where_the_engine_itself_takes_long_rejected_drafts_are_neither_sought_nor_verified():
    """A search takes half a step: one in fifty steps, after those that the budget of the start pays for."""
    costs = StepCosts({1: 1.0, 16: 1.1}, bookkeeping=0.5)
    steps = Steps(costs, right=False)
    calls = []
    proposer = steps.planner.drafts_of(steps.sequences[0])._proposer
    inner = proposer.propose
    proposer.propose = lambda *arguments: calls.append(arguments) or inner(*arguments)
    for _ in range(250):
        steps.step()
    assert 5 <= len(calls) <= 4 / 0.5 + 250 / 50 + 1


def test_drafts_that_the_executor_proposed_are_verified_although_the_budget_is_spent():
    """Forced tokens of a grammar take no search."""
    steps = Steps(StepCosts({1: 1.0, 16: 1.1}, bookkeeping=0.01), right=False)
    steps.step()
    steps.step()
    steps.planner._draft_budget.charge(100.0)
    (sequence,) = steps.sequences
    steps.planner.drafts_of(sequence).receive(len(sequence.token_ids), [7, 8], is_forced=True, is_late=False)
    assert steps.step() == [2]


def speedup_with_model(acceptance: float, num_tokens: int, draft_seconds: float, count: int = 1) -> float:
    """Speed-up by a draft model whose tokens are accepted with this probability; a step takes a second."""
    costs = StepCosts({1: 1.0, 5: 1.05, 16: 1.6}, draft_seconds)
    steps = Steps(costs, count, model="draft", num_speculative_tokens=4)
    draw, seconds, num_steps = random.Random(1), 0.0, 0
    while min(one.num_outputs for one in steps.sequences) < num_tokens:
        chunks = steps.scheduler.schedule()
        proposed = [chunk.num_proposed for chunk in chunks]
        at_depth = (sum(length > depth for length in proposed) for depth in range(max(proposed)))
        seconds += costs.step(sum(1 + len(chunk.drafts) for chunk in chunks)) + sum(map(costs.proposal, at_depth))
        num_steps += 1
        for chunk in chunks:
            sequence, accepted = chunk.sequence, 0
            sequence.collected(chunk)
            while accepted < len(chunk.drafts) and draw.random() < acceptance:
                accepted += 1
            if chunk.drafts:
                steps.planner.drafts_of(sequence).observe(len(chunk.drafts), accepted)
                chunk.accept(accepted)
            sequence.token_ids += [7] * (accepted + 1)
            if chunk.num_proposed:
                steps.planner.drafts_of(sequence).receive(
                    len(sequence.token_ids), [7] * chunk.num_proposed, False, False
                )
    return sum(one.num_outputs for one in steps.sequences) / count / seconds


@pytest.mark.parametrize(
    ("acceptance", "draft_seconds", "least"),
    [
        (0.9, 0.3, 1.7),
        (0.8, 0.3, 1.4),
        (0.9, 0.5, 1.3),
        (0.8, 0.5, 1.1),
        (0.5, 0.5, 0.96),
        (0.1, 0.3, 0.96),
        (0.0, 0.5, 0.96),
    ],
)
def test_a_draft_model_that_pays_is_used_and_one_that_does_not_costs_little(acceptance, draft_seconds, least):
    """Also where the acceptance that a sequence begins with would not pay."""
    assert speedup_with_model(acceptance, 250, draft_seconds) >= least


def test_a_draft_model_that_cannot_save_time_is_not_run():
    assert speedup_with_model(1.0, 100, draft_seconds=1.0) == 1.0


def test_drafts_come_back_when_the_text_repeats_itself_again():
    steps = Steps(StepCosts({1: 1.0, 16: 2.0}), right=False)
    for _ in range(60):
        steps.step()
    steps._right = True
    assert max(steps.step()[0] for _ in range(40)) >= 3


def test_steps_in_which_no_sequence_may_have_draft_tokens_do_not_look_for_any(monkeypatch):
    """A look costs time in every step of a small model."""
    looks = []
    steps = Steps(StepCosts({1: 1.0, 16: 2.0}), count=4, right=False)
    real = steps.planner._is_due
    monkeypatch.setattr(steps.planner, "_is_due", lambda one: looks.append(one) or real(one))
    for _ in range(100):
        steps.step()
    looks.clear()
    for _ in range(100):
        steps.step()
    assert 0 < len(looks) <= 4 * 100 // 4


def test_steps_in_which_no_length_pays_do_not_look_until_the_batch_changes(monkeypatch):
    looks = []
    steps = Steps(COMPUTE_BOUND, count=2)
    real = steps.planner._is_due
    monkeypatch.setattr(steps.planner, "_is_due", lambda one: looks.append(one) or real(one))
    for _ in range(20):
        steps.step()
    assert len(looks) <= 4
    steps.planner.costs = FREE
    steps.scheduler.remove(steps.sequences[1])
    assert steps.step() != [0] or steps.step() != [0]


def test_a_new_sequence_gets_draft_tokens_while_the_others_pause():
    steps = Steps(StepCosts({1: 1.0, 16: 1.2}), right=False)
    for _ in range(60):
        steps.step()
    spec = admit("new", [4, 5, 6] * 5, SamplingParams(max_tokens=50), ModelLimits(300, 400, 400))
    steps.sequences.append(Sequence(spec, RequestTimes(0.0)))
    steps.scheduler.add(steps.sequences[-1])
    calls = []
    proposer = steps.planner.drafts_of(steps.sequences[-1])._proposer
    inner = proposer.propose
    proposer.propose = lambda *arguments: calls.append(arguments) or inner(*arguments)
    for _ in range(3):
        steps.step()
    assert calls, "it is not paused with them"


@pytest.mark.parametrize(("count", "drafts"), [(3, True), (4, False), (5, False)])
def test_the_limit_on_requests_is_obeyed_at_its_edge(count, drafts):
    """Row 34: the limit is dead, or everything collapses there. Beyond it a step is one without speculation."""
    steps = Steps(FREE, count, disable_by_batch_size=4)
    lengths = [steps.step() for _ in range(6)]
    assert any(map(any, lengths)) == drafts


def test_a_step_has_no_more_rows_than_were_recorded():
    steps = Steps(FREE, 4, num_speculative_tokens=6)
    steps.planner.max_rows = 7
    totals = [sum(steps.step()) for _ in range(8)]
    assert max(totals) == 3


def test_drafts_end_before_the_context_of_the_draft_model_and_the_last_token():
    """Row 39: a draft beyond its context."""
    steps = Steps(FREE, max_model_len=12)
    sequence = steps.sequences[0]
    while len(sequence.token_ids) < 40:
        length = steps.step()[0]
        assert not length or sequence.num_computed_tokens <= 12
    steps = Steps(FREE)
    sequence = steps.sequences[0]
    while sequence.num_outputs < 300:
        steps.step()
    assert sequence.num_outputs == 300, "the last draft was no longer than what is left"


def test_no_sequence_is_preempted_for_drafts():
    steps = Steps(FREE, 2, pages=1 + 2 * 3 + 1)  # a page is left for both
    for _ in range(3):
        steps.step()
    assert steps.scheduler.num_preemptions == 0
