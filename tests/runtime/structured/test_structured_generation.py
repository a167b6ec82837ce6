"""Structured output end to end: valid answers, the same ones however they are computed, and combinations."""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path

import jsonschema
import pydantic
import pytest
from lora_adapters import adapted, save_adapter
from replay_proposer import FREE, replaying

from aiakq import LLM, GuidedDecodingParams, LoRARequest, SamplingParams, StructuredOutputsParams
from aiakq.errors import AiakqError
from aiakq.kernels.ops import sampling as sampling_ops
from aiakq.runtime.speculation import step_costs

sys.path.insert(0, str(Path(__file__).parent))
from schemas import hundred

PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "ages": {"type": "array", "items": {"type": "integer", "maximum": 99, "minimum": 0}, "maxItems": 4},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
TAG = {"type": "tag", "begin": "<i>", "content": {"type": "regex", "pattern": "[0-9]{9}"}, "end": "</i>"}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "disable_by_batch_size": 1000}
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 3, "disable_by_batch_size": 1000}
#: One of every kind.
CONSTRAINTS = [
    {"json": PET},
    {"regex": "[0-9]{3}-[a-f]{2,9}"},
    {"choice": ["yes and no", 'say "no"\\', "ünï😀"]},
    {"grammar": 'root ::= "<" [a-d]+ ("x" | "y") [0-9]{1,5} ">"'},
    {"json": PET, "disable_any_whitespace": True},
    {"structural_tag": {"format": TAG}},
]


@pytest.fixture(scope="module")
def llm(example_model) -> LLM:
    return LLM(model=str(example_model), dtype="float32")


def params(number: int, **others) -> SamplingParams:
    """Every constraint in turn, each with another way of sampling, and every seventh request without one."""
    sampling = [{}, {"top_p": 0.8}, {"top_k": 9, "logprobs": 2}, {"temperature": 0}, {"min_p": 0.01, "logprobs": 1}]
    constraint = None if number % 7 == 6 else CONSTRAINTS[number % len(CONSTRAINTS)]
    return SamplingParams(
        **({"max_tokens": 40, "seed": number} | sampling[number % len(sampling)] | others),
        structured_outputs=constraint,
    )


def requests(count: int = 28) -> tuple[list[str], list[SamplingParams]]:
    words = "once upon a time there was a house in the wood and nobody lived in it but the wind".split()
    prompts = [" ".join(words[: 1 + number % 17]) for number in range(count)]
    return prompts, [params(number) for number in range(count)]


def answers(llm: LLM, count: int = 28, adapters: list[LoRARequest | None] | None = None) -> list:
    results = llm.generate(*requests(count), use_tqdm=False, lora_request=adapters)
    llm.engine.check()
    return [(result.outputs, result.error) for result in results]


@pytest.fixture(scope="module")
def expected(llm) -> list:
    found = answers(llm)
    assert all(error is None for _, error in found)
    assert sum(outputs[0].finish_reason == "stop" for outputs, _ in found) > 15
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 13},
        {"num_gpu_blocks_override": 21, "block_size": 4, "max_model_len": 76},
        {"enable_prefix_caching": False},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_gpu_blocks_override": 21, "block_size": 4, "max_model_len": 76},
        {"speculative_config": DRAFTS},
        {"speculative_config": DRAFTS, "num_gpu_blocks_override": 21, "block_size": 4, "max_model_len": 76},
        {"speculative_config": DRAFT_MODEL},
        {"enforce_eager": True},
        {"tensor_parallel_size": 2},
        {
            **{"tensor_parallel_size": 2, "speculative_config": DRAFTS},
            **{"num_gpu_blocks_override": 21, "block_size": 4, "max_model_len": 76},
        },
        {"pipeline_parallel_size": 2},
    ],
    ids=[
        "alone",
        "chunked",
        "preempted",
        "no_prefix_cache",
        "async",
        "async_preempted",
        "drafts",
        "drafts_preempted",
        "draft_model",
        "eager",
        "tensor",
        "tensor_drafts_preempted",
        "pipeline",
    ],
)
def test_answers_do_not_depend_on_how_they_are_computed(arguments, example_model, expected, behind_bytes):
    if arguments.get("speculative_config") is DRAFT_MODEL:
        arguments = {"speculative_config": {**DRAFT_MODEL, "model": str(example_model)}}
    llm = behind_bytes(LLM(model=str(example_model), dtype="float32", **arguments))
    assert answers(llm) == expected
    if "num_gpu_blocks_override" in arguments:
        assert llm.engine.stats.preemptions > 0
    assert answers(llm) == expected, "with prefixes cached"


@pytest.fixture(scope="module")
def adapters(example_model, expected, tmp_path_factory) -> list[LoRARequest | None]:
    """An adapter for every second request."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(example_model, dtype="float32")
    folder = save_adapter(adapted(model, r=4), tmp_path_factory.mktemp("adapter"))
    return [LoRARequest("adapter", 1, str(folder)) if number % 2 else None for number in range(len(expected))]


@pytest.fixture(scope="module")
def alone(example_model, adapters) -> list:
    """The answers with ``adapters``, one request at a time."""
    return answers(LLM(str(example_model), dtype="float32", enable_lora=True, max_num_seqs=1), adapters=adapters)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"speculative_config": DRAFTS}, {"tensor_parallel_size": 2}],
    ids=["plain", "drafts", "tensor"],
)
def test_adapters_and_grammars_go_together(arguments, example_model, expected, adapters, alone):
    """A request with an adapter gets what it gets alone, and one without it what it gets without adapters."""
    llm = LLM(str(example_model), dtype="float32", enable_lora=True, **arguments)
    assert answers(llm, adapters=adapters) == alone
    assert alone[::2] == expected[::2]
    assert alone[1::2] != expected[1::2]
    for number, (outputs, error) in enumerate(alone):
        assert error is None
        if number % 7 != 6:
            _check(CONSTRAINTS[number % len(CONSTRAINTS)], outputs[0])


def test_drafts_may_cross_the_end_of_the_reasoning(example_model, monkeypatch):
    """The grammar begins in the middle of a row of draft tokens, which a model like the target's proposes."""
    monkeypatch.setattr(step_costs, "measure_step_costs", lambda *arguments: FREE)
    reasoning = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "a"}
    tag = {"type": "sequence", "elements": [reasoning, {"type": "regex", "pattern": "[0-9]{4}"}]}
    wanted = [
        SamplingParams(max_tokens=60, seed=seed, structured_outputs={"structural_tag": {"format": tag}})
        for seed in range(12)
    ]
    speculating = {"speculative_config": {**DRAFT_MODEL, "model": str(example_model)}}
    found = []
    for arguments in ({}, speculating):
        llm = LLM(model=str(example_model), dtype="float32", **arguments)
        found.append([result.outputs[0] for result in llm.generate(["Once"] * 12, wanted, use_tqdm=False)])
    assert llm.engine.stats.drafts.accepted > 20
    assert found[0] == found[1]
    assert all(re.fullmatch("[^a]*a[0-9]{4}", one.text) for one in found[0] if one.finish_reason == "stop")
    assert sum(one.finish_reason == "stop" for one in found[0]) > 6


def test_white_space_ends_also_if_the_model_prefers_it(llm):
    blanks = dict.fromkeys(llm.get_tokenizer().encode("\n", add_special_tokens=False), 100.0)
    wanted = SamplingParams(max_tokens=400, seed=1, logit_bias=blanks, structured_outputs={"json": PET})
    output = llm.generate("Once", wanted, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "stop" and "\n" * 20 in output.text and "\n" * 21 not in output.text
    jsonschema.validate(json.loads(output.text), PET)


@pytest.mark.parametrize("mistakes", [0.0, 0.3])
@pytest.mark.parametrize("ahead", [False, True])
def test_known_answers_as_draft_tokens_change_nothing(example_model, expected, mistakes, ahead):
    """Grammars begin and end inside the draft tokens, which may break them."""
    plain = LLM(model=str(example_model), dtype="float32")
    known = plain.generate(*requests(), use_tqdm=False)
    tokens = [one.prompt_token_ids + list(one.outputs[0].token_ids) for one in known]
    llm = LLM(model=str(example_model), dtype="float32", speculative_config=DRAFTS, async_scheduling=ahead)
    assert answers(replaying(llm, tokens, mistakes)) == expected
    drafts = llm.engine.stats.drafts
    assert 100 < drafts.accepted < drafts.drafts, "requests with the same prompt have other outputs"


def test_the_sampler_of_gpus_gives_the_same(example_model, expected, monkeypatch):
    """The reference, which samples on GPUs, with the order of candidates that both have."""
    llm = LLM(model=str(example_model), dtype="float32")
    llm.engine.executor._sampler = sampling_ops.TorchSampler(sampling_ops.CANDIDATES)
    found = answers(llm)
    same = sum(one[0][0].token_ids == other[0][0].token_ids for one, other in zip(found, expected, strict=True))
    assert same >= len(expected) - 2  # rounding may decide otherwise
    for (outputs, error), number in zip(found, range(len(found)), strict=True):
        assert error is None
        _check(CONSTRAINTS[number % len(CONSTRAINTS)], outputs[0]) if number % 7 != 6 else None


def _check(constraint: dict, output) -> None:
    if output.finish_reason != "stop":
        return
    if "json" in constraint:
        jsonschema.validate(json.loads(output.text), constraint["json"])
    elif "regex" in constraint:
        assert re.fullmatch(constraint["regex"], output.text)
    elif "choice" in constraint:
        assert output.text in constraint["choice"]
    elif "grammar" in constraint:
        assert re.fullmatch("<[a-d]+[xy][0-9]{1,5}>", output.text)
    else:
        assert re.fullmatch("<i>[0-9]{9}</i>", output.text)


def test_texts_match_the_requested_format(expected):
    for number, (outputs, _) in enumerate(expected):
        if number % 7 != 6:
            _check(CONSTRAINTS[number % len(CONSTRAINTS)], outputs[0])


def test_a_hundred_schemas_at_temperature_one(llm):
    """The weights know nothing of JSON: what is valid is so because of the grammar."""
    schemas = hundred()
    assert len(schemas) >= 100
    params = [
        SamplingParams(seed=number, max_tokens=300, min_p=1e-4, structured_outputs=StructuredOutputsParams(json=one))
        for number, one in enumerate(schemas)
    ]
    results = llm.generate(["Once"] * len(schemas), params, use_tqdm=False)
    for schema, result in zip(schemas, results, strict=True):
        output = result.outputs[0]
        assert result.error is None, (schema, result.error)
        if output.finish_reason == "length":  # digits may go on forever
            assert re.search('"number"|date-time|additionalProperties": {', json.dumps(schema)), (schema, output.text)
        else:
            jsonschema.validate(json.loads(output.text), schema)
    assert sum(result.outputs[0].finish_reason == "stop" for result in results) >= 100


def test_log_probabilities_are_those_of_the_model(llm):
    constrained = SamplingParams(temperature=0, max_tokens=4, logprobs=1, structured_outputs={"regex": "[0-9]{9}"})
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    first = llm.generate("Once upon a", constrained, use_tqdm=False)[0].outputs[0]
    plain = llm.generate("Once upon a", free, use_tqdm=False)[0].outputs[0]
    assert first.token_ids[0] != plain.token_ids[0]
    best = {token: entry.logprob for token, entry in first.logprobs[0].items() if entry.rank == 1}
    assert best == {plain.token_ids[0]: plain.logprobs[0][plain.token_ids[0]].logprob}


def test_both_python_names_and_pydantic_models(llm):
    class Pet(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        legs: bool

    schema = Pet.model_json_schema()
    texts = [
        llm.generate("A", SamplingParams(seed=1, max_tokens=60, **each), use_tqdm=False)[0].outputs[0].text
        for each in (
            {"guided_decoding": GuidedDecodingParams(json=schema, backend="xgrammar")},
            {"structured_outputs": StructuredOutputsParams(json=json.dumps(schema))},
            {"structured_outputs": {"json": Pet}},
        )
    ]
    assert len(set(texts)) == 1
    assert set(json.loads(texts[0])) == {"legs"}


@pytest.mark.parametrize(
    ("others", "finish_reason"),
    [
        ({"ignore_eos": True}, "stop"),
        ({"min_tokens": 30, "max_tokens": 40}, "stop"),
        ({"max_tokens": 3}, "length"),
        ({"stop": ["-"]}, "stop"),
        ({"repetition_penalty": 1.5, "logit_bias": {20: 5.0}}, "stop"),
    ],
)
def test_a_complete_text_ends_whatever_else_is_asked_for(llm, others, finish_reason):
    wanted = SamplingParams(**{"max_tokens": 40, "seed": 2} | others, structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"})
    output = llm.generate("Once", wanted, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == finish_reason
    if "stop" in others:
        assert re.fullmatch("[0-9]{3}", output.text)
    elif finish_reason == "stop":
        assert re.fullmatch("[0-9]{3}-[a-f]{2}", output.text)


def test_the_end_of_the_text_is_an_end_token_where_more_could_follow(llm):
    end = llm.engine.limits.eos_token_ids
    for others in ({}, {"ignore_eos": True}):
        wanted = SamplingParams(
            max_tokens=200, seed=5, logit_bias={end[0]: 30.0}, **others, structured_outputs={"regex": "a{3,}"}
        )
        output = llm.generate("Once", wanted, use_tqdm=False)[0].outputs[0]
        assert output.finish_reason == "stop" and output.token_ids[-1] in end
        assert re.fullmatch("a{3,}", output.text)


def test_tokens_that_nothing_is_left_of_fail_by_name(llm):
    letters = llm.get_tokenizer().encode("xyz", add_special_tokens=False)
    wanted = SamplingParams(allowed_token_ids=letters, structured_outputs={"regex": "[0-9]+"})
    result = llm.generate("Once", wanted, use_tqdm=False)[0]
    assert result.outputs[0].finish_reason == "error" and "no token is left" in result.error


def test_grammars_that_explode_fail_alone(llm):
    bomb = SamplingParams(min_tokens=400, max_tokens=400, structured_outputs={"grammar": "start: e\ne: e e | /[a-b]/"})
    result, fine = llm.generate(["Once"] * 2, [bomb, params(1)], use_tqdm=False)
    assert result.outputs[0].finish_reason == "error" and "grammar" in result.error
    assert len(result.outputs[0].token_ids) > 20
    assert fine.error is None


def test_a_mask_in_error_never_ends_a_text_as_if_it_were_complete(llm, monkeypatch):
    """The library allows end-of-sequence once it is in error."""
    from aiakq.runtime.structured.matcher import GrammarMatcher

    fill = GrammarMatcher.fill_mask

    def late(self, address):
        if self._matcher.validate_tokens([0]) == 0 and self._calls > 2:
            self._matcher.consume_token(0)  # a special token is never allowed
        self._calls += 1
        fill(self, address)

    monkeypatch.setattr(GrammarMatcher, "_calls", 0, raising=False)
    monkeypatch.setattr(GrammarMatcher, "fill_mask", late)
    result = llm.generate("Once", params(1), use_tqdm=False)[0]
    assert result.outputs[0].finish_reason == "error" and "grammar" in result.error


def test_a_token_that_the_grammar_refuses_fails_its_request_alone(llm, expected, monkeypatch):
    """A mask that allows everything, in one request of a batch."""
    from aiakq.runtime.structured.matcher import GrammarMatcher

    fill = GrammarMatcher.fill_mask
    wrong: list[GrammarMatcher] = []

    def planted(self, address):
        fill(self, address)
        wrong.append(self) if not wrong else None
        if self is wrong[0]:
            ctypes.memset(address, 0xFF, 4 * self.num_words)

    monkeypatch.setattr(GrammarMatcher, "fill_mask", planted)
    found = answers(llm)
    failed = [number for number, (_, error) in enumerate(found) if error is not None]
    assert len(failed) == 1 and "grammar" in found[failed[0]][1]
    assert found[failed[0]][0][0].finish_reason == "error"
    del found[failed[0]]
    assert found == expected[: failed[0]] + expected[failed[0] + 1 :]


def test_a_refused_grammar_stops_nothing(llm):
    with pytest.raises(AiakqError, match="uniqueItems"):
        llm.generate(
            "Once", SamplingParams(guided_decoding=GuidedDecodingParams(json={"type": "array", "uniqueItems": True}))
        )
    assert not llm.engine.has_work()
    assert llm.generate("Once", params(1), use_tqdm=False)[0].error is None


def test_without_a_tokenizer_there_is_no_grammar(example_model):
    llm = LLM(model=str(example_model), dtype="float32", skip_tokenizer_init=True)
    with pytest.raises(AiakqError, match="tokenizer"):
        llm.generate([5, 6], params(1))


def test_json_output_has_no_whitespace_by_default(example_model):
    config = {"backend": "xgrammar", "disable_any_whitespace": True}
    llm = LLM(model=str(example_model), dtype="float32", structured_outputs_config=config)
    text = llm.generate("Once", params(0), use_tqdm=False)[0].outputs[0].text
    assert text.startswith('{"name":"') and ',"ages":[' in text
