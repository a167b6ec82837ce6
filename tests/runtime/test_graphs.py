"""Decoding through graphs: padding, copies and sizes are tested here; only a GPU can capture (tests/gpu.py)."""

from __future__ import annotations

import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.kernels.cpu import library
from aiakq.runtime import graphs
from aiakq.runtime.graphs import DecodeGraphs, sizes


@pytest.mark.parametrize(("most", "wanted"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (70, [*sizes(64), 70])])
def test_sizes(most, wanted):
    assert sizes(most) == wanted


def test_sizes_end_with_the_most_there_may_be():
    for most in range(1, 300):
        made = sizes(most)
        assert made == sorted(set(made)) and made[-1] == most


@pytest.mark.skipif(library.unavailable() is not None, reason="torch's products depend on the number of rows")
def test_decoding_through_tensors_that_stay(tiny_model, monkeypatch):
    """Sequences come and go, so that sizes change and pages are handed on; the answers are those without graphs."""

    def captured(compute, pool):
        result = compute()
        return lambda: result.copy_(compute()), result

    monkeypatch.setattr(graphs, "captured", captured)
    llm = LLM(
        str(tiny_model("LlamaForCausalLM")), dtype="float32", max_model_len=64, max_num_seqs=6, enforce_eager=True
    )
    assert llm.engine.facts["step"] == "operation by operation"
    runner = llm.engine.runner
    draw = torch.Generator().manual_seed(1)
    prompts = [
        {"prompt_token_ids": torch.randint(3, 300, (1 + 5 * n % 40,), generator=draw).tolist()} for n in range(14)
    ]
    params = [SamplingParams(temperature=0, max_tokens=3 + n % 9, logprobs=2) for n in range(14)]

    def answers():
        results = llm.generate(prompts, params, use_tqdm=False)
        return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]

    wanted = answers()
    runner.program = DecodeGraphs(runner.model, runner.caches, 6, 64, runner.page_size, runner.device)
    assert answers() == wanted
    assert {1, 2, 4, 6} <= runner.program._made.keys()
