"""Speculative decoding does not change the output, in any mode and for any parameter, whatever the draft tokens are."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from mixed_requests import WISHES, answers, requests
from replay_proposer import FREE, planner_of, replaying
from safetensors.torch import load_file, save_file

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.kernels.ops import sampling
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.speculation import step_costs

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "disable_by_batch_size": 1000}


@pytest.fixture(autouse=True)
def free(monkeypatch) -> None:
    """Draft tokens cost nothing, so that as many as possible are proposed, whatever the load of this machine."""
    monkeypatch.setattr(step_costs, "measure_step_costs", lambda *arguments: FREE)


@pytest.fixture(scope="module")
def folder(tiny_model) -> str:
    return str(tiny_model("LlamaForCausalLM"))


@pytest.fixture(scope="module")
def expected(folder) -> list:
    return answers(LLM(folder, dtype="float32", max_model_len=128))


def tokens_of(expected: list) -> list[list[int]]:
    prompts, _, _ = requests(320)
    return [
        prompt["prompt_token_ids"] + list(output.token_ids)
        for prompt, (outputs, _, _) in zip(prompts, expected, strict=True)
        for output in outputs
    ]


def test_the_requests_cover_every_sampling_parameter(expected):
    text_only = {"detokenize", "skip_special_tokens", "spaces_between_special_tokens"}
    text_only |= {"truncate_prompt_tokens", "truncation_side"}
    # Budgets of thoughts are compared with and without drafts in tests/runtime/protocol/test_thought_budget.py.
    elsewhere = {"guided_decoding", "thinking_token_budget", "extra_args"}
    names = {field.name for field in fields(SamplingParams) if field.init} - text_only - elsewhere
    assert names == {name for wish in WISHES for name in wish}
    outputs = [output for found, _, _ in expected for output in found]
    assert {output.stop_reason for output in outputs} >= {"ccf", "gdd", "b", None}
    assert any(len(output.token_ids) > 6 and output.finish_reason == "stop" for output in outputs)
    assert not any(error for _, _, error in expected)


@pytest.mark.parametrize("mistakes", [0.0, 0.3])
def test_answers_are_those_without(folder, expected, engine_mode, engine_modes, mistakes, behind_bytes):
    arguments = {"dtype": "float32", "max_model_len": 128, **engine_modes[engine_mode]}
    llm = LLM(folder, speculative_config=NGRAM, **arguments)
    llm = replaying(behind_bytes(llm), tokens_of(expected), mistakes)
    plain = LLM(folder, **arguments)
    functions = llm.engine.executor is not None and hasattr(llm.engine.executor, "register_logits_processors")
    assert answers(llm, functions) == answers(plain, functions)
    drafts = llm.engine.stats.drafts
    assert drafts.accepted > 20 and llm.engine.stats.steps < plain.engine.stats.steps
    assert (drafts.accepted < drafts.drafts) == (mistakes > 0) or drafts.accepted < drafts.drafts
    if engine_mode == "preempted":
        assert llm.engine.stats.preemptions > 0


def test_answers_are_those_without_over_ranks(folder, expected):
    llm = LLM(folder, dtype="float32", max_model_len=128, tensor_parallel_size=2, speculative_config=NGRAM)
    replaying(llm, tokens_of(expected), 0.3)
    assert answers(llm, functions=False) == answers(LLM(folder, dtype="float32", max_model_len=128), functions=False)
    assert llm.engine.stats.drafts.accepted > 20


@pytest.mark.parametrize("mode", ["batched", "chunked", "preempted", "small_pages"])
def test_answers_are_those_without_one_step_ahead(folder, expected, mode, engine_modes):
    """Steps with draft tokens wait for the results before them, and those after them for theirs."""
    arguments = {"dtype": "float32", "max_model_len": 128, "async_scheduling": True, **engine_modes[mode]}
    llm = replaying(LLM(folder, speculative_config=NGRAM, **arguments), tokens_of(expected), 0.3)
    assert llm.engine.max_pending_steps == 2
    assert answers(llm) == expected
    assert llm.engine.stats.drafts.accepted > 20
    assert mode != "preempted" or llm.engine.stats.preemptions > 0


def test_steps_stay_ahead_where_nothing_is_accepted(example_model):
    llm = LLM(str(example_model), dtype="float32", speculative_config={"method": "ngram"}, async_scheduling=True)
    scheduler = llm.engine.scheduler
    waited = []
    inner = scheduler.awaits_results
    scheduler.awaits_results = lambda: (waited.append(inner()), waited[-1])[1]
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=200, ignore_eos=True)
    llm.generate(["a b c"] * 2, params, use_tqdm=False)
    assert any(waited[:20]) and not any(waited[-100:])


@pytest.mark.parametrize("mode", ["batched", "preempted"])
def test_answers_are_those_without_over_stages(folder, expected, mode, engine_modes):
    arguments = {"dtype": "float32", "max_model_len": 128, "pipeline_parallel_size": 2, **engine_modes[mode]}
    llm = replaying(LLM(folder, speculative_config=NGRAM, **arguments), tokens_of(expected), 0.3)
    assert answers(llm, functions=False) == answers(LLM(folder, dtype="float32", max_model_len=128), functions=False)
    assert llm.engine.stats.drafts.accepted > 20


@pytest.mark.parametrize(
    "architecture",
    [
        "Gemma2ForCausalLM",
        "MistralForCausalLM",
        "GptOssForCausalLM",
        "DeepseekV3ForCausalLM",
        "FalconH1ForCausalLM",
        "Lfm2ForCausalLM",
        "MambaForCausalLM",
        "KimiLinearForCausalLM",
        "Qwen3NextForCausalLM",
    ],
)
def test_every_way_of_computing_gives_the_same(architecture, tiny_model):
    folder = str(tiny_model(architecture))
    plain = answers(LLM(folder, dtype="float32", max_model_len=128))
    llm = LLM(folder, dtype="float32", max_model_len=128, speculative_config=NGRAM)
    assert answers(replaying(llm, tokens_of(plain), 0.2)) == plain
    assert llm.engine.stats.drafts.accepted > 20


def test_the_sampler_of_gpus_accepts_the_same(folder, monkeypatch):
    """With few candidates some tokens are undecided and are sampled again from the whole vocabulary."""
    monkeypatch.setenv("AIAKQ_KERNELS", "cpu,sampling=torch")
    monkeypatch.setattr(sampling, "CANDIDATES", 2)
    plain = answers(LLM(folder, dtype="float32", max_model_len=128))
    again = []
    inner = Sequence.resample
    monkeypatch.setattr(Sequence, "resample", lambda sequence: (again.append(sequence.id), inner(sequence))[1])
    llm = replaying(LLM(folder, dtype="float32", max_model_len=128, speculative_config=NGRAM), tokens_of(plain), 0.2)
    assert answers(llm) == plain
    assert again and llm.engine.stats.drafts.accepted > 20


def test_a_text_that_repeats_itself_takes_fewer_steps(example_model):
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompt = "It was the best of times , it was the worst of times , it was the age"
    plain = LLM(str(example_model), dtype="float32")
    llm = LLM(str(example_model), dtype="float32", speculative_model="[ngram]", num_speculative_tokens=7)
    found = [one.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for one in (plain, llm)]
    assert found[0] == found[1]
    assert llm.engine.stats.steps < 0.8 * plain.engine.stats.steps


def test_limits_disable_draft_tokens(example_model):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for limits, count in (({"disable_by_batch_size": 2}, 2), ({"max_model_len": 10}, 1)):
        llm = LLM(str(example_model), dtype="float32", speculative_config={"method": "ngram", **limits})
        llm.generate(["a b c d a b c d a b c d"] * count, params, use_tqdm=False)
        assert llm.engine.stats.drafts.drafts == 0
    # The last token of all gets no draft token.
    llm = LLM(str(example_model), dtype="float32", speculative_config={"method": "ngram"})
    llm.generate("a b c d a b c d", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert llm.engine.stats.drafts.drafts == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"speculative_config": {"method": "eagle"}}, "eagle"),
        ({"speculative_config": {"method": "medusa", "model": "some/heads"}}, "typical acceptance"),
        ({"speculative_config": {"method": "mtp"}}, "multi-token prediction"),
        ({"speculative_config": {"method": "suffix", "suffix_decoding_max_tree_depth": 1}}, "max_tree_depth"),
        ({"speculative_config": {"method": "suffix", "suffix_decoding_min_token_prob": 1.5}}, "min_token_prob"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "num_speculative_tokens"),
        ({"speculative_config": {"method": "ngram", "tokens": 1}}, "tokens"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "--speculative-config"),
        ({"speculative_config": {}}, "--speculative-config"),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_max": 10**9}}, "prompt_lookup_max"),
        ({"speculative_config": {"method": "ngram", "max_model_len": True}}, "max_model_len"),
        ({"speculative_model": "some/model"}, "some/model"),
        ({"num_speculative_tokens": 3}, "--speculative-model"),
        ({"speculative_config": {"method": "ngram"}, "speculative_model": "[ngram]"}, "--speculative-model"),
        ({"speculative_model": "other", "pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"speculative_model": "[ngram]", "ngram_prompt_lookup_min": 9}, "prompt_lookup_min"),
    ],
    ids=str,
)
def test_what_does_not_go_is_refused_by_name(arguments, named, example_model):
    with pytest.raises(AiakqError) as caught:
        LLM(str(example_model), **arguments)
    assert caught.value.id in ("bad_option", "option_conflict", "model_hub", "unsupported")
    assert named in str(caught.value)


@pytest.fixture(scope="module")
def hybrid(tiny_model) -> str:
    """A model with recurrent layers and attention."""
    return str(tiny_model("Qwen3NextForCausalLM"))


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_states_of_every_rank_go_on_there(hybrid, parallel):
    plain = answers(LLM(hybrid, dtype="float32", max_model_len=128), functions=False)
    llm = LLM(hybrid, dtype="float32", max_model_len=128, speculative_config=NGRAM, **{parallel: 2})
    assert answers(replaying(llm, tokens_of(plain), 0.3), functions=False) == plain
    assert llm.engine.stats.drafts.accepted > 20


@pytest.mark.parametrize("mistakes", [0.0, 0.4])
@pytest.mark.parametrize("mode", ["chunked", "preempted", "small_pages"])
def test_states_go_on_after_the_draft_tokens_that_were_accepted(hybrid, engine_modes, mode, mistakes):
    arguments = {"dtype": "float32", "max_model_len": 128, **engine_modes[mode]}
    plain = answers(LLM(hybrid, **arguments))
    llm = replaying(LLM(hybrid, speculative_config=NGRAM, **arguments), tokens_of(plain), mistakes)
    assert answers(llm) == plain
    assert llm.engine.stats.drafts.accepted > 20
    assert mode != "preempted" or llm.engine.stats.preemptions > 0


def test_outputs_of_one_salt_speed_up_each_other_and_no_others(example_model):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm = LLM(str(example_model), dtype="float32", speculative_config={"method": "suffix"})

    def run(salt: str) -> tuple[list[int], int]:
        before = llm.engine.stats.steps
        prompt = {"prompt": "It was a dark night", "cache_salt": salt}
        found = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        return list(found), llm.engine.stats.steps - before

    first, again, other = run("one"), run("one"), run("other")
    assert first[0] == again[0] == other[0]
    assert again[1] < 0.7 * first[1] and other[1] > 0.9 * first[1]


@pytest.mark.parametrize("mode", ["batched", "chunked", "preempted"])
def test_suffix_decoding_changes_no_answer(folder, expected, engine_modes, mode):
    config = {"method": "suffix", "disable_by_batch_size": 1000}
    arguments = {"dtype": "float32", "max_model_len": 128, **engine_modes[mode]}
    llm = LLM(folder, speculative_config=config, **arguments)
    planner_of(llm).max_rows = 100
    for _ in range(2):  # the second time every output is known
        before = llm.engine.stats.steps, llm.engine.stats.drafts.accepted
        assert answers(llm) == expected
    assert llm.engine.stats.drafts.accepted - before[1] > 50
    assert llm.engine.stats.steps - before[0] < before[0]


DRAFTING = {"num_speculative_tokens": 4, "speculative_disable_by_batch_size": 1000}
#: What affects a draft model, which shares the page table of the target.
DRAFT_MODES = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 16, "enable_chunked_prefill": True},
    "preempted": {"num_gpu_blocks_override": 40, "block_size": 4},
    "prefix": {"enable_prefix_caching": True},
    "eager": {"enforce_eager": True},
    "ahead": {"async_scheduling": True},
    "ranks": {"tensor_parallel_size": 2},
}


def write_nearly(source: str, target: Path) -> str:
    """Copy a model with weights that are a little different: a draft model that is often right."""
    shutil.copytree(source, target)
    draw = torch.Generator().manual_seed(1)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        changed = {
            name: tensor + 0.02 * tensor.std() * torch.randn(tensor.shape, generator=draw)
            for name, tensor in tensors.items()
        }
        save_file({name: changed[name].to(tensors[name].dtype) for name in tensors}, file, {"format": "pt"})
    return str(target)


@pytest.fixture(scope="module")
def nearly(folder, tmp_path_factory) -> str:
    return write_nearly(folder, tmp_path_factory.mktemp("nearly") / "model")


@pytest.fixture(scope="module")
def nearly_hybrid(hybrid, tmp_path_factory) -> str:
    return write_nearly(hybrid, tmp_path_factory.mktemp("hybrid") / "model")


@pytest.mark.parametrize("mode", DRAFT_MODES)
def test_a_draft_model_does_not_change_the_output(folder, nearly, expected, mode):
    arguments = {"dtype": "float32", "max_model_len": 128, **DRAFT_MODES[mode]}
    llm = LLM(folder, speculative_model=nearly, **DRAFTING, **arguments)
    functions = mode != "ranks"
    plain = expected if functions else answers(LLM(folder, dtype="float32", max_model_len=128), functions=False)
    assert answers(llm, functions) == plain
    drafts = llm.engine.stats.drafts
    assert drafts.drafts > drafts.accepted > 20
    if mode == "preempted":
        assert llm.engine.stats.preemptions > 0


@pytest.mark.parametrize("mode", [mode for mode in DRAFT_MODES if mode != "ranks"])
def test_a_draft_model_may_have_states_too(hybrid, nearly_hybrid, mode):
    """Those of its chain of draft tokens are dropped where the target model rejects them."""
    arguments = {"dtype": "float32", "max_model_len": 128, **DRAFT_MODES[mode]}
    llm = LLM(hybrid, speculative_model=nearly_hybrid, **DRAFTING, **arguments)
    assert answers(llm) == answers(LLM(hybrid, **arguments))
    drafts = llm.engine.stats.drafts
    assert drafts.drafts > drafts.accepted > 20
    assert mode != "preempted" or llm.engine.stats.preemptions > 0


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3NextForCausalLM", "MambaForCausalLM"])
def test_the_same_model_as_draft_is_always_accepted(architecture, tiny_model):
    """With any sampling parameters: it samples with the same random numbers, penalties and grammars."""
    folder = str(tiny_model(architecture))
    llm = LLM(folder, dtype="float32", max_model_len=128, speculative_model=folder, **DRAFTING)
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=1),
        SamplingParams(max_tokens=40, ignore_eos=True, seed=2, top_p=0.8, repetition_penalty=1.3, logit_bias={5: 4.0}),
        SamplingParams(max_tokens=40, seed=3, structured_outputs={"regex": "[a-z ]{200}"}),
    ]
    llm.generate([[7, 8, 9 + number] for number in range(3)], params, use_tqdm=False)
    drafts = llm.engine.stats.drafts
    assert drafts.accepted == drafts.drafts > 60
    assert llm.engine.stats.steps < 20


def test_a_draft_model_computes_the_tokens_it_missed(folder, nearly):
    """While many sequences run it proposes nothing; afterwards its cache lacks their tokens."""
    arguments = {"dtype": "float32", "max_model_len": 256}
    many = [SamplingParams(max_tokens=20 if at else 120, ignore_eos=True, seed=at) for at in range(4)]
    prompts = [[3 + at, 4, 5] for at in range(4)]
    llm = LLM(
        folder, speculative_model=nearly, num_speculative_tokens=4, speculative_disable_by_batch_size=3, **arguments
    )
    found = [
        [one.outputs[0].token_ids for one in each.generate(prompts, many)] for each in (llm, LLM(folder, **arguments))
    ]
    assert found[0] == found[1]
    assert llm.engine.stats.drafts.accepted > 10


def test_forced_tokens_of_a_grammar_are_draft_tokens(example_model):
    schema = {
        "type": "object",
        "properties": {"a_long_name_of_a_property": {"type": "boolean"}},
        "required": ["a_long_name_of_a_property"],
    }
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs={"json": schema})
    plain = LLM(str(example_model), dtype="float32")
    llm = LLM(str(example_model), dtype="float32", speculative_model="[ngram]", num_speculative_tokens=6)
    found = [one.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids for one in (plain, llm)]
    assert found[0] == found[1]
    assert llm.engine.stats.steps < 0.8 * plain.engine.stats.steps


def test_unsuitable_draft_models_are_refused(folder, example_model, tiny_model):
    with pytest.raises(AiakqError, match="its vocabulary has .* tokens, the model"):
        LLM(folder, dtype="float32", speculative_model=str(example_model))
    with pytest.raises(AiakqError, match="EAGLE"):
        LLM(folder, dtype="float32", speculative_config={"method": "eagle3", "model": folder})
    with pytest.raises(AiakqError, match="draft_model"):
        LLM(folder, dtype="float32", speculative_config={"method": "draft_model"})


def test_the_quantization_method_of_the_draft_model_is_checked(folder, nearly):
    with pytest.raises(AiakqError, match="awq"):
        LLM(folder, dtype="float32", speculative_model=nearly, speculative_model_quantization="awq")


def test_a_draft_model_with_a_shorter_context_proposes_up_to_there(folder, nearly, tmp_path):
    shutil.copytree(nearly, tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    prompts = [[*range(3, 3 + length)] for length in (5, 36, 39, 40, 41, 90)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    arguments = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 32}
    llm = LLM(folder, speculative_model=str(tmp_path / "short"), **DRAFTING, **arguments)
    found = [
        [one.outputs[0].token_ids for one in each.generate(prompts, params)] for each in (llm, LLM(folder, **arguments))
    ]
    assert found[0] == found[1]
    assert llm.engine.stats.drafts.drafts > llm.engine.stats.drafts.accepted > 2
