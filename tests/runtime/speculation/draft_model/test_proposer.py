"""DraftModel: which tokens a draft model computes, and when."""

from __future__ import annotations

import itertools

import pytest
from replay_proposer import FREE, planner_of

from aiakq import LLM, SamplingParams
from aiakq.runtime.protocol.command import EnableDrafts
from aiakq.runtime.speculation import step_costs
from aiakq.runtime.speculation.draft_length import StepCosts

#: Steps take as long as they have tokens: draft tokens never pay.
COMPUTE_BOUND = StepCosts({1: 1.0, 2: 2.0})
PROMPTS = [{"prompt_token_ids": [5 + number, *range(30, 100)]} for number in range(3)]


@pytest.fixture
def llm(tiny_model, monkeypatch) -> LLM:
    """A model that is its own draft model."""
    monkeypatch.setattr(step_costs, "measure_step_costs", lambda *arguments: FREE)
    folder = str(tiny_model("LlamaForCausalLM"))
    speculation = {"method": "draft_model", "model": folder, "num_speculative_tokens": 4}
    return LLM(folder, dtype="float32", max_model_len=256, speculative_config=speculation)


@pytest.fixture
def computed(llm, monkeypatch) -> list[tuple[int, int]]:
    """First position and number of tokens of every chunk that the draft model computes."""
    runner = llm.engine.executor.proposer.runner
    seen = []
    prepare = runner.prepare

    def record(chunks, *rest):
        seen.extend((chunk.first, chunk.count) for chunk in chunks)
        return prepare(chunks, *rest)

    monkeypatch.setattr(runner, "prepare", record)
    return seen


def generate(llm: LLM, max_tokens: int = 8) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_prompts_are_computed_with_those_of_the_model(llm, computed):
    generate(llm)
    assert [chunk for chunk in computed if chunk[1] > 3] == [(0, 72)] * 3
    assert llm.engine.stats.drafts.accepted == llm.engine.stats.drafts.drafts > 10


def test_nothing_is_computed_while_draft_tokens_cannot_pay(llm, computed):
    """No prompt and no probe either."""
    planner_of(llm).costs = COMPUTE_BOUND
    generate(llm, max_tokens=150)
    assert computed == []


def test_a_cached_prefix_without_its_keys_is_computed_when_they_are_needed(llm, computed):
    planner_of(llm).costs = COMPUTE_BOUND
    wanted = generate(llm)
    assert computed == []
    planner_of(llm).costs = FREE
    assert generate(llm) == wanted
    assert (0, 72) in computed
    drafts = llm.engine.stats.drafts
    assert drafts.accepted == drafts.drafts > 10, "with the right keys every draft token is accepted"
    computed.clear()
    assert generate(llm) == wanted
    assert max(count for _, count in computed) <= 10, "now they are there"


def test_a_sequence_catches_up_in_one_chunk(llm, computed):
    scheduler = llm.engine.scheduler
    planner_of(llm).costs = COMPUTE_BOUND
    inner, steps = scheduler.schedule, []

    def schedule(now):
        steps.append(now)
        planner_of(llm).costs = FREE if len(steps) > 20 else COMPUTE_BOUND
        return inner(now)

    scheduler.schedule = schedule
    generate(llm, max_tokens=40)
    long = [chunk for chunk in computed if chunk[1] > 5]
    assert len(long) == 3 and all(first == 0 and count > 85 for first, count in long)
    assert llm.engine.stats.drafts.accepted > 10


def test_while_draft_tokens_are_disabled_nothing_is_computed_and_no_page_counts_as_computed(llm, computed):
    wanted = generate(llm)
    computed.clear()
    llm.engine.step(0.0, [EnableDrafts(False)])
    num_drafts = llm.engine.stats.drafts.drafts
    assert generate(llm) == wanted and computed == [] and llm.engine.stats.drafts.drafts == num_drafts
    llm.engine.step(0.0, [EnableDrafts(True)])
    assert generate(llm) == wanted
    assert max(count for _, count in computed) > 60, "cached pages may have been written without the draft model"
    drafts = llm.engine.stats.drafts
    assert drafts.accepted == drafts.drafts > num_drafts


@pytest.mark.parametrize("ahead", [False, True])
def test_draft_tokens_can_be_switched_at_any_step(llm, ahead):
    """Also while a step with draft tokens is pending."""
    wanted = generate(llm, max_tokens=40)
    engine = llm.engine
    engine.max_pending_steps = 2 if ahead else 1
    inner, numbers = engine.step, itertools.count()

    def step(now, inbox):
        number = next(numbers)
        return inner(now, [*inbox, EnableDrafts(number % 6 < 3)] if number % 3 == 0 else inbox)

    engine.step = step
    before = engine.stats.drafts.accepted
    assert generate(llm, max_tokens=40) == wanted
    assert engine.stats.drafts.accepted > before
    engine.check()
