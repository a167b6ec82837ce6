"""SamplingParams, by what each does to an answer; what only shapes logits is in test_sampler.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.text.output_processor import bad_word_ids

#: The 26 of the reference page, and the test that shows what each does.
SHOWN_BY = {
    "n": "test_results_have_vllms_shapes",
    "best_of": "test_the_best_of_several_are_returned_best_first",
    "presence_penalty": "test_penalties_match_their_formulas",
    "frequency_penalty": "test_penalties_match_their_formulas",
    "repetition_penalty": "test_penalties_match_their_formulas",
    "temperature": "test_draws_follow_the_distribution",
    "top_p": "test_cuts_keep_the_right_tokens_and_renormalize",
    "top_k": "test_cuts_keep_the_right_tokens_and_renormalize",
    "min_p": "test_cuts_keep_the_right_tokens_and_renormalize",
    "seed": "test_a_seed_gives_the_same_tokens_whatever_else_runs",
    "stop": "test_stop_strings_end_the_text_wherever_they_fall",
    "stop_token_ids": "test_stop_token_is_returned_but_not_shown",
    "include_stop_str_in_output": "test_stop_strings_end_the_text_wherever_they_fall",
    "ignore_eos": "test_special_tokens_are_shown_or_not",
    "max_tokens": "test_results_have_vllms_shapes",
    "min_tokens": "test_bias_allowed_ids_and_min_tokens",
    "logprobs": "test_log_probabilities_of_the_whole_vocabulary",
    "prompt_logprobs": "test_prompt_logprobs_match_transformers_however_the_prompt_is_cut",
    "detokenize": "test_ids_without_text",
    "skip_special_tokens": "test_special_tokens_are_shown_or_not",
    "spaces_between_special_tokens": "test_tokenizers_in_python_get_arguments_for_spaces",
    "logits_processors": "test_logits_processors_decide",
    "truncate_prompt_tokens": "test_the_end_of_a_prompt_can_be_kept",
    "guided_decoding": "test_impossible_values_are_refused_by_name",
    "logit_bias": "test_bias_allowed_ids_and_min_tokens",
    "allowed_token_ids": "test_bias_allowed_ids_and_min_tokens",
    "bad_words": "test_bad_words_do_not_come_up",
}


@pytest.mark.parametrize("name", SHOWN_BY)
def test_every_parameter_exists_and_has_a_test(name):
    assert len(SHOWN_BY) == 26 + 1, "and bad_words, which came later"
    SamplingParams(**{name: getattr(SamplingParams(), name)})
    definition = f"def {SHOWN_BY[name]}("
    assert any(definition in path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))


@pytest.fixture(scope="module")
def llm(example_model) -> LLM:
    return LLM(model=str(example_model), dtype="float32", max_logprobs=-1, num_gpu_blocks_override=400)


def answer(llm: LLM, prompt="Once upon a time", **params):
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_tokens", 2**63 - 1, "at most 2147483648"),
        ("thinking_token_budget", 2**53, "at most 2147483648"),
        ("seed", 2**64, "at most 9223372036854775807"),
        ("temperature", float("inf"), "at most 10000"),
        ("temperature", float("nan"), "0 or more"),
        ("max_tokens", -1, "0 or more"),
        ("top_p", 2, "above 0, at most 1"),
    ],
)
def test_a_value_beyond_a_limit_is_refused_with_the_limit(name, value, allowed):
    with pytest.raises(AiakqError, match=f"allowed is {allowed}.") as caught:
        SamplingParams(**{name: value})
    assert caught.value.id == "value_out_of_range"


def test_the_best_of_several_are_returned_best_first(llm):
    params = {"seed": 3, "temperature": 1.2, "max_tokens": 12, "ignore_eos": True}
    every = answer(llm, n=6, **params).outputs
    ranked = sorted(every, key=lambda output: -output.cumulative_logprob)
    found = answer(llm, n=2, best_of=6, **params).outputs
    assert [output.token_ids for output in found] == [output.token_ids for output in ranked[:2]]
    assert [output.index for output in found] == [0, 1]
    assert len(answer(llm, best_of=3, **params).outputs) == 1


def test_bad_words_do_not_come_up(llm):
    params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    plain = answer(llm, **params).outputs[0]
    words = [word for word in plain.text.split() if word.isalpha() and len(word) > 2][:3]
    assert words
    found = answer(llm, bad_words=words, **params).outputs[0]
    text = llm.get_tokenizer().decode(found.token_ids)
    assert not set(words) & set(text.split()) and found.token_ids != plain.token_ids
    several = [ids for ids in bad_word_ids(llm.tokenizer, ["Constantinople"]) if len(ids) > 1]
    assert several, "a word of several tokens is forbidden as a whole"


def test_the_end_of_a_prompt_can_be_kept(llm):
    ids = llm.tokenizer.encode("It was the best of times, it was the worst of times")
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    wanted = answer(llm, {"prompt_token_ids": ids[-4:]}, **params)
    found = answer(llm, {"prompt_token_ids": ids}, truncate_prompt_tokens=4, **params)
    assert found.prompt_token_ids == ids[-4:] and found.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert answer(llm, {"prompt_token_ids": ids}, truncate_prompt_tokens=500, **params).prompt_token_ids == ids
    much = {"prompt_token_ids": (ids * 200)[:1500]}
    assert len(answer(llm, much, truncate_prompt_tokens=-1, **params).prompt_token_ids) == 1024 - 6
    with pytest.raises(AiakqError):
        answer(llm, much, **params)


def test_log_probabilities_of_the_whole_vocabulary(llm, example_model):
    output = answer(llm, temperature=0, max_tokens=2, logprobs=-1, ignore_eos=True).outputs[0]
    size = llm.engine.limits.vocab_size
    assert [len(position) for position in output.logprobs] == [size, size]
    few = LLM(model=str(example_model), dtype="float32", max_logprobs=3, num_gpu_blocks_override=40)
    assert len(answer(few, max_tokens=1, logprobs=3).outputs[0].logprobs) == 1
    for wanted in (4, -1):
        with pytest.raises(AiakqError, match="at most 3"):
            answer(few, max_tokens=1, logprobs=wanted)


def test_prompt_logprobs_do_without_cached_pages(llm):
    prompt = "Down, down, down. Would the fall never come to an end? I wonder how many miles I have fallen by now."
    first = answer(llm, prompt, max_tokens=1, prompt_logprobs=0)
    assert answer(llm, prompt, max_tokens=1).num_cached_tokens == 0, "nor do they leave pages behind"
    assert answer(llm, prompt, max_tokens=1).num_cached_tokens > 0
    again = answer(llm, prompt, max_tokens=1, prompt_logprobs=0)
    assert again.num_cached_tokens == 0 and again.prompt_logprobs == first.prompt_logprobs


def test_logits_processors_decide(llm):
    prompts = []

    def only_even(prompt, outputs, logits):
        prompts.append(prompt)
        logits[1::2] = float("-inf")
        return logits

    output = answer(llm, temperature=0, max_tokens=9, ignore_eos=True, logits_processors=[only_even]).outputs[0]
    assert len(output.token_ids) == 9 and all(token % 2 == 0 for token in output.token_ids)
    assert prompts == [llm.tokenizer.encode("Once upon a time")] * 9

    def fails(outputs, logits):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        answer(llm, logits_processors=[fails])
    assert not llm.engine.has_work() and answer(llm, max_tokens=2).finished


def test_ids_without_text(llm):
    params = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    plain, ids = answer(llm, **params).outputs[0], answer(llm, detokenize=False, logprobs=1, **params).outputs[0]
    assert ids.token_ids == plain.token_ids and ids.text == ""
    assert {entry.decoded_token for position in ids.logprobs for entry in position.values()} == {None}


def test_special_tokens_are_shown_or_not(llm):
    end = llm.config.generation.eos_token_ids[0]
    params = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "logit_bias": {end: 100}}
    special = llm.get_tokenizer().decode([end])
    for spaces in (True, False):
        shown = answer(llm, skip_special_tokens=False, spaces_between_special_tokens=spaces, **params).outputs[0]
        assert shown.token_ids == [end] * 3 and shown.text == special * 3
    assert answer(llm, **params).outputs[0].text == ""


def test_a_request_without_an_allowed_token_fails_and_others_continue(llm):
    wrong = SamplingParams(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2, max_tokens=5)
    results = llm.generate(["a", "b"], [wrong, SamplingParams(max_tokens=3)], use_tqdm=False)
    assert results[0].outputs[0].finish_reason == "error" and "no token is left" in results[0].error
    assert results[1].outputs[0].finish_reason in ("length", "stop") and results[1].error is None


def test_a_seed_gives_the_same_tokens_whatever_else_runs(llm):
    params = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 24, "ignore_eos": True}
    prompts = [f"Chapter {n}" for n in range(12)]
    alone = [answer(llm, prompt, seed=n, **params).outputs[0].token_ids for n, prompt in enumerate(prompts)]
    llm.reset_prefix_cache()
    sets = [SamplingParams(seed=n, **params) for n in range(12)]
    busy = [SamplingParams(max_tokens=60, presence_penalty=1.0, logprobs=3)] * 12
    crowd = llm.generate(prompts[::-1] + ["noise"] * 12, sets[::-1] + busy, use_tqdm=False)[:12]
    assert [result.outputs[0].token_ids for result in crowd[::-1]] == alone


def test_a_reset_prefix_cache_is_empty(llm):
    prompt = "It is a truth universally acknowledged, that a single man in possession of a good fortune must want."
    answer(llm, prompt, max_tokens=1)
    assert answer(llm, prompt, max_tokens=1).num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert answer(llm, prompt, max_tokens=1).num_cached_tokens == 0


def test_priorities_count_with_their_policy_only(llm, example_model):
    ignored = llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False, priority=[1, 0])
    assert [len(result.outputs[0].token_ids) for result in ignored] == [1, 1]
    other = LLM(
        model=str(example_model),
        dtype="float32",
        scheduling_policy="priority",
        max_num_seqs=1,
        num_gpu_blocks_override=40,
    )
    results = other.generate(["a", "b", "c"], SamplingParams(max_tokens=4), use_tqdm=False, priority=[2, 1, -5])
    started = [result.metrics.first_scheduled_time for result in results]
    assert started[2] < started[1] < started[0]
    with pytest.raises(AiakqError, match="2 priority"):
        other.generate(["a"], SamplingParams(), use_tqdm=False, priority=[1, 2])


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ([1], "invalid_type"),
        ({1: 2}, "invalid_type"),
        ({"a": {"b": 1}}, "invalid_type"),
        ({"a": [None]}, "invalid_type"),
        ({"": 1}, "value_out_of_range"),
        ({"a" * 65: 1}, "value_out_of_range"),
        ({str(number): 1 for number in range(65)}, "value_out_of_range"),
        ({"a": 2**64}, "value_out_of_range"),
        ({"a": [1, -(2**63) - 1]}, "value_out_of_range"),
    ],
)
def test_values_for_extensions_are_few_and_plain(given, code):
    with pytest.raises(AiakqError) as refused:
        SamplingParams(extra_args=given)
    assert refused.value.id == code and str(refused.value.param).startswith("extra_args")


def test_values_for_extensions_are_kept_as_they_are():
    given = {"text": "a\ud800", "numbers": [1, 2.5], "flag": True}
    assert SamplingParams(extra_args=given).extra_args == given | {"text": "a\ufffd"}


@pytest.mark.parametrize(
    "given",
    [
        {"ignore_eos": "false"},
        {"skip_special_tokens": None},
        {"detokenize": "no"},
        {"stop": 5},
        {"bad_words": "word"},
        {"logits_processors": print},
        {"logit_bias": 5},
        {"logit_bias": [("a", 1.0)]},
    ],
)
def test_values_of_another_type_are_refused_by_name(given):
    (name,) = given
    with pytest.raises(AiakqError, match=f"{name} has the wrong type"):
        SamplingParams(**given)


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding", "repetition_detection"])
def test_a_key_that_is_no_string_is_refused_by_name(name):
    with pytest.raises(AiakqError) as caught:
        SamplingParams(**{name: {1: 1}})
    assert (caught.value.id, caught.value.fields["param"]) == ("unknown_field", f"{name}.1")


def test_a_bias_can_be_a_list_of_pairs():
    assert SamplingParams(logit_bias=[(5, 1.0), [5, 2.0], [7, False]]).logit_bias == {5: 3.0, 7: float("-inf")}
