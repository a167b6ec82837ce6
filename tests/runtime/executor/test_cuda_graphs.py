"""Decoding through graphs: padding, copies and sizes are tested here; only a GPU can capture (examples/gpu/gpu.py)."""

from __future__ import annotations

import pytest
import torch
from lora_adapters import adapted, save_adapter
from replay_proposer import planner_of

from aiakq import LLM, LoRARequest, SamplingParams
from aiakq.errors import AiakqError
from aiakq.kernels.cpu import library
from aiakq.runtime.build.model_loader import load_model
from aiakq.runtime.config.compilation import CompilationConfig
from aiakq.runtime.config.engine import EngineConfig
from aiakq.runtime.distributed.model_share import ModelShare
from aiakq.runtime.executor import cuda_graphs as graphs
from aiakq.runtime.executor.cuda_graphs import DecodeGraphs, sizes
from aiakq.runtime.executor.kv_cache import fit_positions
from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sequences import RunningSequences
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import Chunk, NewSequence, StepBatch
from aiakq.runtime.speculation.draft_length import StepCosts


@pytest.mark.parametrize(("most", "wanted"), [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (70, [*sizes(64), 70])])
def test_captured_batch_sizes_up_to_a_maximum(most, wanted):
    assert sizes(most) == wanted


def test_captured_batch_sizes_end_with_the_maximum():
    for most in range(1, 300):
        made = sizes(most)
        assert made == sorted(set(made)) and made[-1] == most


@pytest.mark.skipif(library.unavailable() is not None, reason="torch's products depend on the number of rows")
def test_decoding_through_tensors_that_stay(tiny_model, monkeypatch):
    """Sequences come and go, so that sizes change and pages are handed on; the answers are those without graphs."""

    def captured(compute, pool):
        return compute

    monkeypatch.setattr(graphs, "captured", captured)
    llm = LLM(
        str(tiny_model("LlamaForCausalLM")), dtype="float32", max_model_len=64, max_num_seqs=6, enforce_eager=True
    )
    assert llm.engine.facts["step"] == "operation by operation"
    runner = llm.engine.executor.runner
    draw = torch.Generator().manual_seed(1)
    prompts = [
        {"prompt_token_ids": torch.randint(3, 300, (1 + 5 * n % 40,), generator=draw).tolist()} for n in range(14)
    ]
    params = [SamplingParams(temperature=0, max_tokens=3 + n % 9, logprobs=2) for n in range(14)]

    def answers():
        results = llm.generate(prompts, params, use_tqdm=False)
        return [(result.outputs[0].token_ids, result.outputs[0].logprobs) for result in results]

    wanted = answers()
    runner.captured = DecodeGraphs(runner.model, runner.caches, sizes(6), 64, runner.page_size, runner.device)
    assert answers() == wanted
    assert {(1, False), (2, False), (4, False), (6, False)} <= runner.captured._made.keys()
    # Steps of more sequences than the largest graph is of, or longer ones, run without.
    runner.captured = DecodeGraphs(runner.model, runner.caches, [3], 30, runner.page_size, runner.device)
    replayed = []
    monkeypatch.setattr(graphs, "captured", lambda compute, pool: lambda: replayed.append(compute()))
    assert answers() == wanted
    assert runner.captured._made.keys() == {(3, False)} and replayed


def test_what_layers_share_is_computed_by_the_graph_too(tiny_model, monkeypatch):
    """Not kept from the run before the capture: the lengths are others when the graph is replayed."""
    monkeypatch.setattr(graphs, "captured", lambda compute, pool: compute() or compute)
    llm = LLM(str(tiny_model("LlamaForCausalLM")), dtype="float32", max_model_len=64, max_num_seqs=1)
    runner, found = llm.engine.executor.runner, []
    runner.captured = DecodeGraphs(runner.model, runner.caches, [1], 64, runner.page_size, runner.device)
    compute = runner.model.compute

    def watched(step, caches):
        found.append(dict(step.context.plans))
        step.context.plans["kept"] = True
        return compute(step, caches)

    monkeypatch.setattr(runner.model, "compute", watched)
    llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert len(found) >= 3 and not any(found)


@pytest.mark.skipif(library.unavailable() is not None, reason="torch's products depend on the number of rows")
def test_stages_decode_through_tensors_that_stay(tiny_model, monkeypatch):
    """Of every stage, from the hidden states of the one before; also if the capture has modified them."""
    monkeypatch.setattr(graphs, "captured", lambda compute, pool: compute() or compute)
    arguments = {"model": str(tiny_model("LlamaForCausalLM", num_hidden_layers=3)), "dtype": "float32", "device": "cpu"}
    config = fit_positions(EngineConfig.from_args({**arguments, "max_model_len": 64, "block_size": 8}))
    params = SamplingParams(temperature=0)
    prompts = [[5, 6, 7], [9] * 11]

    def logits(stages, captured):
        runners = [
            Runner(load_model(config, ModelShare(None, stage, stages))[0], 12, 8, torch.device("cpu"))
            for stage in range(stages)
        ]
        running, found = RunningSequences(3, 4), []
        new = [NewSequence(at, RequestSpec(str(at), tokens, params, 9, 0)) for at, tokens in enumerate(prompts)]
        chunks = [Chunk(at, 0, len(tokens), [1 + 3 * at, 2 + 3 * at], True) for at, tokens in enumerate(prompts)]
        for runner in runners if captured else ():
            runner.captured = DecodeGraphs(runner.model, runner.caches, [1, 4], 64, 8, runner.device)
        for number in range(4):
            sequences = running.update(StepBatch([], [], new if number == 0 else [], chunks), {})
            step = runners[0].prepare(chunks, sequences, running)
            for runner in runners:
                step.model_input.hidden = output = runner.forward(step.model_input)
            found.append(output[: len(chunks)].clone())
            for sequence in sequences:
                sequence.token_ids.append(41 + number)
            count = 2 if number < 2 else 1
            chunks = [Chunk(at, len(prompts[at]) + number, 1, [], True) for at in range(count)]
        assert not captured or all(runner.captured.captured_sizes == {1, 4} for runner in runners)
        return found

    with torch.inference_mode():
        wanted = logits(1, False)
        assert all(map(torch.equal, logits(3, True), wanted)) and all(map(torch.equal, logits(3, False), wanted))


@pytest.mark.skipif(library.unavailable() is not None, reason="torch's products depend on the number of rows")
def test_steps_with_adapters_have_graphs_of_their_own(tiny_model, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    folder = tiny_model("LlamaForCausalLM")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    request = LoRARequest("a", 1, str(save_adapter(adapted(model, r=4), tmp_path)))
    llm = LLM(str(folder), dtype="float32", max_model_len=64, max_num_seqs=4, enforce_eager=True, enable_lora=True)
    runner, during = llm.engine.executor.runner, []

    def captured(compute, pool):
        during.append(runner.model.adapters.tokens.any_rows)
        return compute

    monkeypatch.setattr(graphs, "captured", captured)
    prompts = [{"prompt_token_ids": [5 + number] * 9} for number in range(4)]
    params = [SamplingParams(temperature=0, max_tokens=3 + number, ignore_eos=True) for number in range(4)]

    def answers():
        results = llm.generate(prompts, params, False, lora_request=[request, None, None, request])
        results += llm.generate(prompts[:2], params[:2], False)
        return [result.outputs[0].token_ids for result in results]

    wanted = answers()
    runner.captured = DecodeGraphs(runner.model, runner.caches, sizes(4), 64, runner.page_size, runner.device)
    assert answers() == wanted
    made = runner.captured._made
    assert {with_adapters for _, with_adapters in made} == {False, True}
    assert during == [with_adapters for _, with_adapters in made] and not runner.model.adapters.tokens.any_rows


class Known:
    """A proposer that knows the answers, all but every fifth token of them."""

    def __init__(self, answers: list[list[int]]) -> None:
        self._answers = answers

    def new_sequence(self, scope: bytes, num_prompt_tokens: int) -> Known:
        return self

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        count = len(token_ids)
        answer = next(one for one in self._answers if one[:count] == token_ids)
        following = enumerate(answer[count : count + max_tokens], count)
        return [token if at % 5 else (token + 1) % 300 for at, token in following]

    def finish(self, token_ids: list[int]) -> None:
        pass


@pytest.mark.skipif(library.unavailable() is not None, reason="torch's products depend on the number of rows")
def test_a_verification_is_replayed_with_each_draft_token_as_a_row(tiny_model, monkeypatch):
    """Also beside sequences without draft tokens; what needs fewer logits than it has tokens runs without a graph."""
    monkeypatch.setattr(graphs, "captured", lambda compute, pool: compute)
    config = {"method": "ngram", "num_speculative_tokens": 3, "disable_by_batch_size": 100}
    arguments = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 6, "enforce_eager": True}
    folder = str(tiny_model("LlamaForCausalLM"))
    llm, plain = LLM(folder, speculative_config=config, **arguments), LLM(folder, **arguments)
    planner_of(llm).costs = StepCosts({1: 1.0, 1000: 1.0})  # draft tokens take no time
    runner = llm.engine.executor.runner
    decode = DecodeGraphs(runner.model, runner.caches, sizes(8), 64, runner.page_size, runner.device)
    shapes = []

    class Watched:
        def accepts(self, step):
            taken = decode.accepts(step)
            shapes.append((taken, step.context.num_decodes, step.context.query_start_list))
            return taken

        def __call__(self, step):
            return decode(step)

    runner.captured = Watched()
    prompts = [{"prompt_token_ids": [5 + n, 6, 7, 8]} for n in range(6)]
    params = [SamplingParams(temperature=0, max_tokens=6 + 3 * n, logprobs=2, ignore_eos=True) for n in range(6)]
    wanted = [one.outputs[0] for one in plain.generate(prompts, params, use_tqdm=False)]
    known = [[*one["prompt_token_ids"], *answer.token_ids] for one, answer in zip(prompts, wanted, strict=True)]
    planner_of(llm).proposer = Known(known)
    found = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
    assert [(one.token_ids, one.logprobs) for one in found] == [(one.token_ids, one.logprobs) for one in wanted]
    assert 0 < llm.engine.stats.drafts.accepted < llm.engine.stats.drafts.drafts
    verified = [starts for taken, decodes, starts in shapes if taken and decodes < len(starts) - 1]
    assert any(len(starts) > 2 for starts in verified), "no step had sequences with and without draft tokens"
    assert not any(taken for taken, _, starts in shapes if starts[-1] > 8)


def test_requested_batch_sizes_are_captured():
    assert sizes(100, CompilationConfig(cudagraph_capture_sizes=(1, 2, 64, 128))) == [1, 2, 64]
    assert sizes(100, CompilationConfig(cudagraph_capture_sizes=(200,))) == [100]
    assert sizes(256, CompilationConfig(max_cudagraph_capture_size=20)) == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, CompilationConfig()),
        ("3", CompilationConfig()),
        (0, CompilationConfig(enforce_eager=True)),
        ("0", CompilationConfig(enforce_eager=True)),
        ({"level": 0}, CompilationConfig(enforce_eager=True)),
        ('{"cudagraph_capture_sizes": [8, 1, 8]}', CompilationConfig(cudagraph_capture_sizes=(1, 8))),
        (
            {"mode": 3, "max_cudagraph_capture_size": 64, "cudagraph_mode": "FULL"},
            CompilationConfig(max_cudagraph_capture_size=64),
        ),
        ({"cudagraph_mode": "none"}, CompilationConfig(enforce_eager=True)),
        ({"use_cudagraph": False}, CompilationConfig(enforce_eager=True)),
        ({"cudagraph_capture_sizes": []}, CompilationConfig(enforce_eager=True)),
    ],
)
def test_compilation_config_values_are_checked(given, wanted, example_model):
    assert EngineConfig.from_args({"model": str(example_model), "compilation_config": given}).compilation == wanted


def test_options_that_disable_cuda_graphs(example_model):
    def capture(**given):
        return EngineConfig.from_args({"model": str(example_model), **given}).compilation

    assert capture(enforce_eager=True).enforce_eager
    assert capture(max_seq_len_to_capture=100) == CompilationConfig(max_seq_len_to_capture=100)


@pytest.mark.parametrize(
    "given",
    ["three", 4, -1, "[1]", '{"custom_ops": ["none"]}', '{"cudagraph_capture_sizes": [0]}', {"cudagraph_mode": "ALL"},
     {"max_cudagraph_capture_size": "8"}, "true"],
)  # fmt: skip
def test_a_compilation_config_that_means_nothing_is_refused(given, example_model):
    with pytest.raises(AiakqError, match="--compilation-config"):
        EngineConfig.from_args({"model": str(example_model), "compilation_config": given})
