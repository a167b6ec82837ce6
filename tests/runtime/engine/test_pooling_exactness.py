"""Embeddings and scores: those of transformers, and the same bits however prompts are batched, cut and interrupted."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aiakq import LLM
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import ScheduledChunk
from aiakq.runtime.models import ARCHITECTURES
from aiakq.runtime.protocol.pooling_params import POOLING_TYPES

NUM_PROMPTS = 12


def _prompts() -> list[list[int]]:
    """Lengths 1 to 90, the longest first; a third of the prompts share a prefix."""
    draw = random.Random(7)
    shared = [draw.randrange(3, 320) for _ in range(40)]
    own = [[draw.randrange(3, 320) for _ in range(draw.choice([1, 2, 7, 30, 50]))] for _ in range(NUM_PROMPTS)]
    prompts = [shared + ids if index % 3 == 0 else ids for index, ids in enumerate(own)]
    return sorted(prompts, key=len, reverse=True)


def _states(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' last hidden states [T, D] of each prompt."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]


def _encoded(behind_bytes, folder: Path, prompts: list[list[int]], **arguments: Any) -> tuple[list[torch.Tensor], LLM]:
    given = {"dtype": "float32", "max_model_len": 128, "block_size": 16, "task": "embed", **arguments}
    llm = behind_bytes(LLM(str(folder), **given))
    results = llm.encode([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    llm.engine.check()
    assert llm.engine.stats.num_free_pages == llm.engine.stats.num_pages
    return [result.outputs.data for result in results], llm


def _preempt_often(patch: pytest.MonkeyPatch) -> None:
    """Preempt the last sequence before every fourth step; prompts that start have pages for all of their tokens."""
    steps = itertools.count()

    def schedule(self: Scheduler, now: float = 0.0) -> list[ScheduledChunk]:
        if next(steps) % 4 == 3 and len(self.running) > 1 and not self.running[-1].pending_chunks:
            self.preempt(self.running[-1])
        return real(self, now)

    real = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


def _weighted_mean(states: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1.0, len(states) + 1)[:, None]
    return (states * weights).sum(0) / weights.sum()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_embeddings_are_those_of_transformers(architecture, tiny_model, behind_bytes, rank_arguments):
    folder, prompts = tiny_model(architecture), _prompts()
    expected = [torch.nn.functional.normalize(states[-1], dim=-1) for states in _states(folder, prompts)]
    found, _ = _encoded(behind_bytes, folder, prompts, **rank_arguments)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("LlamaForCausalLM", kind) for kind in POOLING_TYPES]
    + [(name, kind) for name in ("Gemma2ForCausalLM", "Qwen3NextForCausalLM") for kind in ("LAST", "MEAN")],
)
def test_every_mode_gives_the_same_bits(
    architecture, kind, tiny_model, engine_modes, behind_bytes, rank_arguments, monkeypatch
):
    folder, prompts = tiny_model(architecture), _prompts()
    step = prompts[0][5]
    pooler = {"pooling_type": kind, "normalize": kind == "MEAN", **({"step_tag_id": step} if kind == "STEP" else {})}
    rows = {
        "LAST": lambda states, ids: states[-1],
        "MEAN": lambda states, ids: torch.nn.functional.normalize(states.mean(0), dim=-1),
        "MAX": lambda states, ids: states.max(0).values,
        "WEIGHTEDMEAN": lambda states, ids: _weighted_mean(states),
        "MEAN_SQRT_LEN": lambda states, ids: states.sum(0) / len(ids) ** 0.5,
        "CLS": lambda states, ids: states[0],
        "ALL": lambda states, ids: states,
        "STEP": lambda states, ids: states[[at for at, token in enumerate(ids) if token == step]],
    }[kind]
    expected = [rows(states, ids) for states, ids in zip(_states(folder, prompts), prompts, strict=True)]
    alone: list[torch.Tensor] = []
    preempted = {**engine_modes["preempted"], "num_gpu_blocks_override": 25, "max_model_len": 96, "max_num_seqs": 8}
    preempted |= {"max_num_batched_tokens": 24, "max_num_partial_prefills": 4, "max_long_partial_prefills": 4}
    modes = engine_modes | {"preempted": preempted, "async": {"async_scheduling": True, "max_num_batched_tokens": 13}}
    if "pipeline_parallel_size" in rank_arguments:
        del modes["async"]
    for mode, given in modes.items():
        arguments = {**given, **rank_arguments, "override_pooler_config": pooler}
        with monkeypatch.context() as patch:
            if mode == "preempted":
                _preempt_often(patch)
            found, llm = _encoded(behind_bytes, folder, prompts, **arguments)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.shape == theirs.shape
            assert (ours - theirs).norm() <= 1e-4 * theirs.norm(), mode
        alone = alone or found
        assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True)), mode
        if mode == "preempted":
            assert llm.engine.stats.preemptions > 0
        again = llm.encode([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
        assert all(torch.equal(one.outputs.data, other) for one, other in zip(again, alone, strict=True)), mode
        may_hit = kind == "LAST" and llm.engine.scheduler.pool.caching
        assert (llm.engine.stats.prefix_hits > 0) == may_hit, mode


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_probabilities_are_those_of_transformers(architecture, tiny_model, tiny_classifier, rank_arguments):
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoConfig, AutoModelForSequenceClassification

    if type(AutoConfig.from_pretrained(tiny_model(architecture))) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        pytest.skip("transformers has no class that classifies")
    folder, prompts = tiny_classifier(architecture, 3), _prompts()
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(str(folder), dtype="float32", max_model_len=128, max_num_batched_tokens=33, **rank_arguments)
    assert llm.engine.limits.task == "classify"
    results = llm.classify([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)
    for ids, result in zip(prompts, results, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(torch.tensor(result.outputs.probs), logits.softmax(-1), rtol=1e-4, atol=1e-5)
        assert result.outputs.num_classes == 3
