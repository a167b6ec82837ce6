"""Step times are measured on the loaded model where draft lengths depend on them, and leave nothing behind."""

from __future__ import annotations

import pytest
from replay_proposer import planner_of

from aiakq import LLM, SamplingParams
from aiakq.runtime.speculation import step_costs
from aiakq.runtime.speculation.draft_length import DEFAULT_COSTS
from aiakq.runtime.speculation.planner import DraftPlanner

NGRAM = {"method": "ngram"}


@pytest.fixture
def measured(monkeypatch) -> list[tuple[int, int]]:
    """Tokens and proposals of the steps that are measured."""
    seen = []
    inner = step_costs._measured_step

    def measured_step(executor, limits, pages, size, num_proposed):
        seen.append((size, num_proposed))
        return inner(executor, limits, pages, size, num_proposed)

    monkeypatch.setattr(step_costs, "_measured_step", measured_step)
    return seen


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_steps_of_every_size_are_measured(ranks, tiny_model, measured):
    llm = LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", speculative_config=NGRAM, **ranks)
    assert set(measured) == {(size, 0) for size in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)}
    costs = planner_of(llm).costs
    assert costs is not DEFAULT_COSTS and 0 < costs.step(1) <= costs.step(16) and costs.proposal(1) == 0
    assert "ms of a step" in llm.engine.facts["speculation"]
    assert llm.engine.stats.num_free_pages == llm.engine.stats.num_pages and llm.engine.stats.steps == 0
    (result,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert len(result.outputs[0].token_ids) == 5
    llm.engine.check()


def test_proposals_of_a_draft_model_are_measured(tiny_model, measured):
    folder = str(tiny_model("LlamaForCausalLM"))
    llm = LLM(folder, dtype="float32", speculative_model=folder)
    assert (1, 4) in measured and planner_of(llm).costs.proposal(1) > 0


def test_steps_are_no_larger_than_the_engine_runs_them(tiny_model, measured):
    LLM(
        str(tiny_model("LlamaForCausalLM")),
        dtype="float32",
        speculative_config=NGRAM,
        max_num_seqs=1,
        max_num_batched_tokens=13,
        max_model_len=11,
    )
    assert set(measured) == {(size, 0) for size in range(1, 6)}


def test_of_slow_models_fewer_sizes_are_measured(tiny_model, measured, monkeypatch):
    monkeypatch.setattr(step_costs, "_SECONDS", 0.0)
    llm = LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", speculative_config=NGRAM)
    assert measured[10:] == [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0)]
    assert planner_of(llm).costs is not DEFAULT_COSTS


def test_nothing_is_measured_without_need(tiny_model, measured):
    folder = str(tiny_model("LlamaForCausalLM"))
    assert LLM(folder, dtype="float32").engine.scheduler.resource(DraftPlanner) is None
    llm = LLM(folder, dtype="float32", speculative_config=NGRAM, load_format="dummy")
    assert planner_of(llm).costs is DEFAULT_COSTS
    assert not measured


def test_a_model_that_computes_nothing_valid_is_not_measured(tiny_model, monkeypatch):
    monkeypatch.setattr(step_costs, "_measured_step", lambda *arguments: None)
    llm = LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", speculative_config=NGRAM)
    assert planner_of(llm).costs is DEFAULT_COSTS
    assert llm.engine.stats.num_free_pages == llm.engine.stats.num_pages
