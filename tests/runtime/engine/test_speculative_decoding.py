"""Speculative decoding: the answers are those without, in every mode and for every parameter, whatever is guessed."""

from __future__ import annotations

import json
import random
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mixed_requests import answers, requests
from safetensors.torch import load_file, save_file

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.kernels.ops import sampling
from aiakq.runtime.engine.sequence import Sequence

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "disable_by_batch_size": 1000}


class Replay:
    """A proposer that knows the answers, and says them with mistakes at random places."""

    def __init__(self, known: list[list[int]], mistakes: float) -> None:
        self._draw = random.Random(3)
        self._mistakes = mistakes
        self._after: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
        for tokens in known:
            self._after[tuple(tokens[:1])].append(tokens)

    def drafter(self) -> Replay:
        return self

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        same = [one for one in self._after[tuple(token_ids[:1])] if one[: len(token_ids)] == token_ids]
        if not same:
            return []
        found = self._draw.choice(same)[len(token_ids) : len(token_ids) + self._draw.randint(1, most)]
        return [token if self._draw.random() > self._mistakes else self._draw.randrange(300) for token in found]


def speculating(llm: LLM, known: list[list[int]], mistakes: float) -> LLM:
    """``llm`` with guesses of ``known`` in any number of rows."""
    scheduler = llm.engine.scheduler
    assert scheduler.config.speculation is not None
    scheduler.config = replace(scheduler.config, speculation=replace(scheduler.config.speculation, max_rows=100))
    scheduler.proposer = Replay(known, mistakes)
    return llm


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


@pytest.mark.parametrize("mistakes", [0.0, 0.3])
def test_answers_are_those_without(folder, expected, engine_mode, engine_modes, mistakes, behind_bytes):
    arguments = {"dtype": "float32", "max_model_len": 128, **engine_modes[engine_mode]}
    llm = LLM(folder, speculative_config=NGRAM, **arguments)
    llm = speculating(behind_bytes(llm), tokens_of(expected), mistakes)
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
    speculating(llm, tokens_of(expected), 0.3)
    assert answers(llm, functions=False) == answers(LLM(folder, dtype="float32", max_model_len=128), functions=False)
    assert llm.engine.stats.drafts.accepted > 20


@pytest.mark.parametrize(
    "architecture", ["Gemma2ForCausalLM", "MistralForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"]
)
def test_every_way_of_computing_gives_the_same(architecture, tiny_model):
    folder = str(tiny_model(architecture))
    plain = answers(LLM(folder, dtype="float32", max_model_len=128))
    llm = LLM(folder, dtype="float32", max_model_len=128, speculative_config=NGRAM)
    assert answers(speculating(llm, tokens_of(plain), 0.2)) == plain
    assert llm.engine.stats.drafts.accepted > 20


def test_the_sampler_of_gpus_accepts_the_same(folder, monkeypatch):
    """Few candidates do not settle every token: some are sampled again, from the whole vocabulary."""
    monkeypatch.setenv("AIAKQ_KERNELS", "cpu,sampling=torch")
    monkeypatch.setattr(sampling, "CANDIDATES", 2)
    plain = answers(LLM(folder, dtype="float32", max_model_len=128))
    again = []
    inner = Sequence.resample
    monkeypatch.setattr(Sequence, "resample", lambda sequence: (again.append(sequence.id), inner(sequence))[1])
    llm = speculating(LLM(folder, dtype="float32", max_model_len=128, speculative_config=NGRAM), tokens_of(plain), 0.2)
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


def test_nothing_is_guessed_where_it_would_not_pay_or_is_forbidden(example_model):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for limits, count in (({"disable_by_batch_size": 2}, 2), ({"max_model_len": 10}, 1)):
        llm = LLM(str(example_model), dtype="float32", speculative_config={"method": "ngram", **limits})
        llm.generate(["a b c d a b c d a b c d"] * count, params, use_tqdm=False)
        assert llm.engine.stats.drafts.drafts == 0
    # The last token of all is not worth a guess.
    llm = LLM(str(example_model), dtype="float32", speculative_config={"method": "ngram"})
    llm.generate("a b c d a b c d", SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert llm.engine.stats.drafts.drafts == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"speculative_config": {"method": "eagle"}}, "eagle"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "num_speculative_tokens"),
        ({"speculative_config": {"method": "ngram", "tokens": 1}}, "tokens"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "--speculative-config"),
        ({"speculative_config": {}}, "--speculative-config"),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_max": 10**9}}, "prompt_lookup_max"),
        ({"speculative_config": {"method": "ngram", "max_model_len": True}}, "max_model_len"),
        ({"speculative_model": "some/model"}, "some/model"),
        ({"num_speculative_tokens": 3}, "--speculative-model"),
        ({"speculative_config": {"method": "ngram"}, "speculative_model": "[ngram]"}, "--speculative-model"),
        ({"speculative_config": {"method": "ngram"}, "async_scheduling": True}, "--async-scheduling"),
        ({"speculative_config": {"method": "ngram"}, "pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"speculative_model": "[ngram]", "ngram_prompt_lookup_min": 9}, "prompt_lookup_min"),
    ],
    ids=str,
)
def test_what_does_not_go_is_refused_by_name(arguments, named, example_model):
    with pytest.raises(AiakqError) as caught:
        LLM(str(example_model), **arguments)
    assert caught.value.id in ("bad_option", "option_conflict", "model_hub") and named in str(caught.value)


def test_states_cannot_be_taken_back(tiny_model):
    with pytest.raises(AiakqError, match="recurrent"):
        LLM(str(tiny_model("Mamba2ForCausalLM")), speculative_config={"method": "ngram"})


GUESSING = {"num_speculative_tokens": 4, "speculative_disable_by_batch_size": 1000}
#: What a model that guesses has to do with: its own pages are those of the other model.
DRAFT_MODES = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 16, "enable_chunked_prefill": True},
    "preempted": {"num_gpu_blocks_override": 40, "block_size": 4},
    "prefix": {"enable_prefix_caching": True},
    "eager": {"enforce_eager": True},
    "ranks": {"tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def nearly(tiny_model, tmp_path_factory) -> str:
    """The model of ``folder`` with weights that are a little different: a draft that is often right."""
    source = Path(tiny_model("LlamaForCausalLM"))
    target = tmp_path_factory.mktemp("nearly") / "model"
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


@pytest.mark.parametrize("mode", DRAFT_MODES)
def test_a_model_that_guesses_changes_no_answer(folder, nearly, expected, mode):
    arguments = {"dtype": "float32", "max_model_len": 128, **DRAFT_MODES[mode]}
    llm = LLM(folder, speculative_model=nearly, **GUESSING, **arguments)
    functions = mode != "ranks"
    plain = expected if functions else answers(LLM(folder, dtype="float32", max_model_len=128), functions=False)
    assert answers(llm, functions) == plain
    drafts = llm.engine.stats.drafts
    assert drafts.drafts > drafts.accepted > 20
    if mode == "preempted":
        assert llm.engine.stats.preemptions > 0


def test_the_same_model_guesses_right(folder):
    """With any sampling parameters: it draws with the same random numbers, and knows penalties and grammars."""
    llm = LLM(folder, dtype="float32", max_model_len=128, speculative_model=folder, **GUESSING)
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=1),
        SamplingParams(max_tokens=40, ignore_eos=True, seed=2, top_p=0.8, repetition_penalty=1.3, logit_bias={5: 4.0}),
        SamplingParams(max_tokens=40, seed=3, structured_outputs={"regex": "[a-z ]{200}"}),
    ]
    llm.generate([[7, 8, 9 + number] for number in range(3)], params, use_tqdm=False)
    drafts = llm.engine.stats.drafts
    assert drafts.accepted == drafts.drafts > 60
    assert llm.engine.stats.steps < 20


def test_a_model_that_guesses_reads_what_it_missed(folder, nearly):
    """Nothing is guessed while many sequences run; then its cache lacks what they have become."""
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


def test_what_a_grammar_forces_is_guessed(example_model):
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


def test_models_that_cannot_guess_are_refused(folder, example_model, tiny_model):
    with pytest.raises(AiakqError, match="its vocabulary has .* tokens, the model"):
        LLM(folder, dtype="float32", speculative_model=str(example_model))
    with pytest.raises(AiakqError, match="EAGLE"):
        LLM(folder, dtype="float32", speculative_config={"method": "eagle3", "model": folder})
    with pytest.raises(AiakqError, match="draft_model with a model"):
        LLM(folder, dtype="float32", speculative_config={"method": "draft_model"})


def test_what_is_expected_of_the_model_that_guesses(folder, nearly):
    with pytest.raises(AiakqError, match="awq"):
        LLM(folder, dtype="float32", speculative_model=nearly, speculative_model_quantization="awq")


def test_a_model_with_a_shorter_context_guesses_up_to_there(folder, nearly, tmp_path):
    shutil.copytree(nearly, tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    prompts = [[*range(3, 3 + length)] for length in (5, 36, 39, 40, 41, 90)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    arguments = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 32}
    llm = LLM(folder, speculative_model=str(tmp_path / "short"), **GUESSING, **arguments)
    found = [
        [one.outputs[0].token_ids for one in each.generate(prompts, params)] for each in (llm, LLM(folder, **arguments))
    ]
    assert found[0] == found[1]
    assert llm.engine.stats.drafts.drafts > llm.engine.stats.drafts.accepted > 2
