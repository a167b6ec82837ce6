"""A recorded step gives the same logits as the model's forward, for any step."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from aiakq import LLM, SamplingParams
from aiakq.kernels.cpu import library
from aiakq.runtime.executor.cpu_program import Program
from aiakq.runtime.models import ARCHITECTURES

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason="the native kernels were not built")

#: Families some of whose operations have no native kernel: the choice of positions by an index, and AltUp.
UNRECORDED = ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "Gemma3nForCausalLM"]
RECORDED = [architecture for architecture in ARCHITECTURES if architecture not in UNRECORDED]


def loaded(folder, **arguments) -> LLM:
    return LLM(str(folder), max_model_len=128, max_num_seqs=8, max_num_batched_tokens=40, **arguments)


def answers(llm, logprobs=5, prompts=20):
    draw = torch.Generator().manual_seed(5)
    asked = [
        {"prompt_token_ids": torch.randint(3, 300, (1 + 7 * n % 60,), generator=draw).tolist()} for n in range(prompts)
    ]
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=logprobs)
    return [(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in llm.generate(asked, params, use_tqdm=False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", RECORDED)
def test_the_same_answers_as_operation_by_operation(architecture, dtype, tiny_model):
    llm = loaded(tiny_model(architecture), dtype=dtype)
    runner = llm.engine.executor.runner
    assert isinstance(runner.captured, Program)
    assert llm.engine.facts["step"] == f"{len(runner.captured)} operations in one call"
    ours = answers(llm)
    runner.captured = None
    assert answers(llm) == ours


@pytest.mark.parametrize("architecture", UNRECORDED)
def test_families_that_cannot_be_recorded_say_so(architecture, tiny_model):
    assert loaded(tiny_model(architecture)).engine.facts["step"].startswith("operation by operation (")


def test_every_step_within_the_bounds_is_run_in_one_call(tiny_model, monkeypatch):
    llm = loaded(tiny_model("LlamaForCausalLM"))

    def forward(*_):
        raise AssertionError("a step was not recorded")

    monkeypatch.setattr(type(llm.engine.executor.runner.model), "forward", forward)
    answers(llm)


def test_a_step_beyond_the_bounds_runs_without_the_recording(tiny_model):
    """Prompt log-probabilities need more rows of logits than were recorded."""
    llm = loaded(tiny_model("LlamaForCausalLM"), enable_prefix_caching=False)
    prompt = {"prompt_token_ids": list(range(3, 33))}
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    runner = llm.engine.executor.runner
    assert runner.captured.bounds.rows < 30
    [before] = llm.generate([prompt], params, use_tqdm=False)
    runner.captured = None
    [after] = llm.generate([prompt], params, use_tqdm=False)
    assert before.prompt_logprobs == after.prompt_logprobs
    assert before.outputs[0].token_ids == after.outputs[0].token_ids


def test_a_model_that_runs_through_transformers_runs_operation_by_operation(tiny_model):
    llm = loaded(tiny_model("GPTNeoXForCausalLM"))
    assert llm.engine.executor.runner.captured is None
    assert llm.engine.facts["step"] == "operation by operation (the model runs through transformers)"
    assert answers(llm)


def test_without_the_library_nothing_is_recorded(tiny_model, monkeypatch):
    expected = answers(loaded(tiny_model("LlamaForCausalLM")), prompts=3)
    monkeypatch.setattr(library, "unavailable", lambda: "for a test")
    llm = loaded(tiny_model("LlamaForCausalLM"))
    assert llm.engine.executor.runner.captured is None
    assert llm.engine.facts["step"] == "operation by operation (no native library)"
    assert [tokens for tokens, _ in answers(llm, prompts=3)] == [tokens for tokens, _ in expected]


def test_the_number_of_threads_may_change(tiny_model):
    llm = loaded(tiny_model("LlamaForCausalLM"))
    expected = answers(llm)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert answers(llm) == expected
    finally:
        torch.set_num_threads(threads)


def test_no_compiler_is_imported(example_model):
    """torch's compiler and its dependencies take seconds at start-up and 120 MB in each process."""
    code = (
        "import sys; from aiakq import LLM; llm = LLM(sys.argv[1], dtype='float32', num_gpu_blocks_override=33); "
        "llm.generate('The', use_tqdm=False); "
        "print([name for name in ('torch._dynamo', 'sympy', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(example_model)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
