"""Asynchronous scheduling: outputs equal those of synchronous scheduling, and a launched step never blocks."""

from __future__ import annotations

import pytest
import torch
from mixed_requests import answers
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from aiakq import LLM, SamplingParams
from aiakq.kernels.cpu import library
from aiakq.kernels.ops import sampling
from aiakq.runtime.config import device as device_config
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.executor import cuda_graphs as graphs
from aiakq.runtime.executor.cuda_graphs import DecodeGraphs
from aiakq.runtime.executor.local import LocalExecutor, LocalPendingStep
from aiakq.runtime.protocol.command import Abort, ResetPrefixCache
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import Chunk, NewSequence, StepBatch


def pair(folder, **arguments) -> tuple[LLM, LLM]:
    given = {"dtype": "float32", "max_model_len": 128, **arguments}
    return LLM(str(folder), **given), LLM(str(folder), async_scheduling=True, **given)


def test_answers_are_the_same_in_every_mode(engine_mode, engine_modes, tiny_model):
    one, ahead = pair(tiny_model("LlamaForCausalLM"), **engine_modes[engine_mode])
    assert (ahead.engine.max_pending_steps, one.engine.max_pending_steps) == (2, 1)
    wanted = answers(one)
    assert answers(ahead) == wanted
    if engine_mode == "batched":
        assert answers(ahead) == wanted, "and with their prefixes in the cache"
    reasons = {output.finish_reason for outputs, _, _ in wanted for output in outputs}
    assert reasons == {"stop", "length"}
    assert max(len(output.token_ids) for outputs, _, _ in wanted for output in outputs) > 60, "up to the context's end"
    if engine_mode == "preempted":
        assert ahead.engine.stats.preemptions > 0


@pytest.mark.parametrize("mode", ["preempted", "small_pages"])
def test_answers_are_the_same_with_encoded_records(mode, engine_modes, tiny_model, behind_bytes):
    one, ahead = pair(tiny_model("LlamaForCausalLM"), **engine_modes[mode])
    expected = answers(one, functions=False)
    assert answers(behind_bytes(ahead), functions=False) == expected
    assert answers(behind_bytes(one), functions=False) == expected


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GPTNeoXForCausalLM"])
def test_answers_of_other_models_are_the_same(architecture, tiny_model):
    one, ahead = pair(tiny_model(architecture))
    assert answers(ahead) == answers(one)


@pytest.mark.parametrize("candidates", [2, 1024])
def test_answers_of_the_sampler_for_gpus_are_the_same(candidates, tiny_model, monkeypatch):
    """With few candidates some tokens are undecided: their sequences go back a step and sample from the vocabulary."""
    monkeypatch.setenv("AIAKQ_KERNELS", "cpu,sampling=torch")
    plenty = answers(LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", max_model_len=128))
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    again = []
    inner = Sequence.resample
    monkeypatch.setattr(Sequence, "resample", lambda sequence: (again.append(sequence.id), inner(sequence))[1])
    one, ahead = pair(tiny_model("LlamaForCausalLM"))
    assert answers(one) == plenty
    from_one, again[:] = sorted(again), []
    assert answers(ahead) == plenty
    assert sorted(again) == from_one and len(set(again)) == len(again), "once for each sequence"
    assert bool(again) == (candidates == 2)


def test_text_and_stop_strings_are_the_same(example_model, heldout_text):
    words = heldout_text.split()
    prompts = [" ".join(words[at * 40 : at * 40 + 3 + at]) for at in range(12)]
    params = [
        SamplingParams(temperature=0.7, seed=n, max_tokens=30, stop=["the", ". ", "e a"], bad_words=["and"])
        for n in range(12)
    ]
    one, ahead = pair(example_model, max_model_len=256)
    found = [[result.outputs for result in llm.generate(prompts, params, use_tqdm=False)] for llm in (one, ahead)]
    assert found[0] == found[1]
    assert {outputs[0].stop_reason for outputs in found[0]} & {"the", ". ", "e a"}


@pytest.mark.skipif(library.unavailable() is not None, reason="torch's products depend on the number of rows")
def test_answers_through_graphs_are_the_same(tiny_model, monkeypatch):
    """The next step overwrites a graph's logits, and is launched after they were sampled."""
    monkeypatch.setattr(graphs, "captured", lambda compute, pool: compute)
    one, ahead = pair(tiny_model("LlamaForCausalLM"), max_num_seqs=6, enforce_eager=True)
    runner = ahead.engine.executor.runner
    runner.captured = DecodeGraphs(runner.model, runner.caches, graphs.sizes(6), 128, runner.page_size, runner.device)
    assert answers(ahead) == answers(one)
    assert runner.captured._made


def spec(id: str, prompt: list[int], max_tokens: int, **more) -> RequestSpec:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return RequestSpec(
        request_id=id,
        prompt_token_ids=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        seed=0,
        **more,
    )


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, int]]:
    """The calls of a local executor, in order, with their numbers of chunks or of sampled tokens."""
    made: list[tuple[str, int]] = []

    def watch(owner, name, called, count):
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (made.append((called, count(given))), inner(*given))[1])

    watch(LocalPendingStep, "launch_model", "launch", lambda given: len(given[0].sequences))
    watch(LocalPendingStep, "launch_sampler", "sample", lambda given: len(given[0].sequences))
    watch(LocalPendingStep, "results", "results", lambda given: given[0].num_sampled)
    return made


@pytest.fixture
def engine(tiny_model):
    llm = LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", num_gpu_blocks_override=60, async_scheduling=True)
    return llm.engine


def test_the_next_step_is_launched_before_results_are_waited_for(engine, calls):
    assert engine.step(0.0, [spec("a", [5] * 4, 3), spec("b", [6] * 4, 2)]).outputs == []
    assert calls == [("launch", 2), ("sample", 2)]
    calls.clear()
    outputs = engine.step(1.0, []).outputs
    assert [(n.request_id, len(n.token_ids), n.times.first_token) for n in outputs] == [("a", 1, 1.0), ("b", 1, 1.0)]
    assert calls == [("launch", 2), ("results", 2), ("sample", 2)]
    calls.clear()
    # b's last token is pending: nothing more is launched for it.
    assert [n.finish_reason for n in engine.step(2.0, []).outputs] == [None, "length"]
    assert calls == [("launch", 1), ("results", 2), ("sample", 1)]
    calls.clear()
    assert [n.finish_reason for n in engine.step(3.0, []).outputs] == ["length"]
    assert calls == [("results", 1)]
    assert not engine.has_work() and engine.stats.steps == 3


def test_the_token_after_the_end_of_an_answer_is_ignored(engine, calls):
    first = engine.step(0.0, [spec("probe", [5] * 4, 2)]).outputs + engine.step(1.0, []).outputs
    ends_with = first[0].token_ids[0]
    while engine.has_work():
        engine.step(2.0, [])
    calls.clear()
    engine.step(3.0, [spec("a", [5] * 4, 9, eos_token_ids=[ends_with])])
    outputs = engine.step(4.0, []).outputs
    assert [n.finish_reason for n in outputs] == ["stop"]
    assert calls == [("launch", 1), ("sample", 1), ("launch", 1), ("results", 1), ("sample", 1)]
    engine.check()
    assert not engine.has_work() and engine.stats.num_free_pages == engine.stats.num_pages
    # It is collected with the next request, which may have the same slot.
    calls.clear()
    outputs = engine.step(5.0, [spec("b", [5] * 4, 1)]).outputs + engine.step(6.0, []).outputs
    assert [(n.request_id, n.token_ids) for n in outputs] == [("b", [ends_with])]
    assert calls == [("launch", 1), ("results", 1), ("sample", 1), ("results", 1)]


def test_an_aborted_request_has_no_more_output_even_if_its_id_is_reused(engine):
    engine.step(0.0, [spec("a", [5] * 20, 9), spec("b", [6] * 4, 3)])
    engine.step(1.0, [])
    news = engine.step(2.0, [Abort(["a"]), spec("a", [7] * 4, 2)]).outputs
    assert [(n.request_id, n.finish_reason, len(n.token_ids)) for n in news] == [("a", "abort", 0), ("b", None, 1)]
    engine.check()
    seen = []
    while engine.has_work():
        seen += [n.request_id for n in engine.step(3.0, []).outputs for _ in n.token_ids]
        engine.check()
    assert sorted(seen) == ["a", "a", "b"]
    engine.step(4.0, [spec("c", [5] * 20, 9)])
    engine.step(5.0, [])
    assert [n.finish_reason for n in engine.abort_all()] == ["abort"]
    engine.check()
    assert engine.stats.num_free_pages == engine.stats.num_pages
    assert engine.step(6.0, []).outputs == []


def test_only_the_request_that_overflows_fails(engine):
    """Its next step is already pending; what that wrote is not reused."""
    runner = engine.executor.runner
    inner, poisoned = runner.model.compute, []

    def forward(step, caches):
        logits = inner(step, caches).float()
        rows = [row for row, at in enumerate(step.logit_rows) if int(step.token_ids[at]) == 7]
        if rows:
            logits[rows] = float("nan")
            poisoned.extend(rows)
        return logits

    assert runner.model.embedding is not None
    runner.captured = None
    runner.model.forward = forward
    engine.step(0.0, [spec("good", [5] * 4, 4), spec("bad", [6] * 20 + [7], 4)])
    outputs = []
    while engine.has_work():
        outputs += engine.step(1.0, []).outputs
        engine.check()
    assert [(n.request_id, n.finish_reason) for n in outputs if n.finish_reason] == [
        ("bad", "error"),
        ("good", "length"),
    ]
    assert poisoned and "finite" in outputs[1].error
    engine.step(2.0, [spec("again", [6] * 20 + [8], 1)])
    assert [n.num_cached_tokens for n in engine.step(3.0, []).outputs] == [0]


def test_pages_being_filled_when_the_prefix_cache_is_reset_are_not_found(engine):
    engine.step(0.0, [spec("a", [5] * 40, 3)])
    engine.step(1.0, [ResetPrefixCache()])
    engine.step(2.0, [spec("b", [5] * 40, 1)])
    cached = {n.request_id: n.num_cached_tokens for _ in range(3) for n in engine.step(3.0, []).outputs}
    assert cached == {"a": 0, "b": 0}
    engine.step(4.0, [spec("c", [5] * 40, 1)])
    assert [n.num_cached_tokens for n in engine.step(5.0, []).outputs] == [32]


def test_a_launched_step_waits_for_nothing(tiny_model, monkeypatch):
    """Fake tensors have no values to read: a step needs none, also if its tokens are on the device."""
    monkeypatch.setenv("AIAKQ_KERNELS", "reference")
    llm = LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", num_gpu_blocks_override=60, enforce_eager=True)
    waited = []

    def copies_on_host(*tensors):
        return lambda: waited.append(tensors)

    monkeypatch.setattr(sampling, "copies_on_host", copies_on_host)
    asked = [{}, {"temperature": 0.9, "top_p": 0.9}, {"frequency_penalty": 1.0}, {"logprobs": 2, "prompt_logprobs": 2}]
    specs = [
        RequestSpec(f"{n}", [5 + n] * 9, SamplingParams(**({"temperature": 0.0} | more)), max_tokens=5, seed=0)
        for n, more in enumerate(asked)
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(DataDependentOutputException):
            torch.ones(1).item()
        executor = LocalExecutor(llm.engine.executor.runner, len(specs), 4)
        new = [NewSequence(slot, spec) for slot, spec in enumerate(specs)]
        first = executor.submit(StepBatch([], [], new, [Chunk(slot, 0, 9, [slot + 1], True) for slot in range(4)]))
        # The tokens of the first step are only on the device.
        second = executor.submit(StepBatch([], [], [], [Chunk(slot, 9, 1, [], True) for slot in range(4)]))
        assert first.is_sampled and not second.is_sampled
        for sequence in second.sequences:
            sequence.token_ids.append(3)
        second.launch_sampler(executor.runner.model.sampler)
        assert second.num_sampled == 4
    assert not waited


def test_async_scheduling_is_the_default_on_a_gpu(example_model, monkeypatch):
    def ahead(**given):
        return EngineConfig.from_args({"model": str(example_model), **given}).scheduler.async_scheduling

    assert not ahead(device="cpu") and ahead(device="cpu", async_scheduling=True)
    monkeypatch.setattr(device_config, "pick_device", lambda name: torch.device("cuda"))
    assert ahead() and not ahead(async_scheduling=False)
