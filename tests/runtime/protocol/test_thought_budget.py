"""thinking_token_budget offline: thoughts end where they have to, and other answers do not change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from eagle3_heads import write_head
from mixed_requests import LETTERS
from replay_proposer import FREE

from aiakq import LLM, SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.protocol.thought_budget import ThoughtMarks, configured_marks
from aiakq.runtime.speculation import step_costs

#: Marks that come up in a text of the letters a to h.
CONFIG = {"reasoning_start_str": "c", "reasoning_end_str": "dgh"}
THINK = ThoughtMarks(("<think>",), ("</think>",), "</think>")


def load(folder: Any, **arguments: Any) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=128, **{"reasoning_config": CONFIG, **arguments})


def requests(folder: Any, budgets: list[int | None]) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    wishes: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0},
        {"temperature": 1.5, "seed": 2, "n": 3, "logprobs": 2},
        {"temperature": 1.0, "seed": 3, "stop": ["ghb", "aa"], "min_tokens": 4},
        {"temperature": 1.0, "seed": 4, "bad_words": ["g"], "repetition_penalty": 1.2},
    ]
    chosen = [(wish, budget) for wish in wishes for budget in budgets]
    params = [
        SamplingParams(max_tokens=30, allowed_token_ids=LETTERS, thinking_token_budget=budget, **wish)
        for wish, budget in chosen
    ]
    prompts = [{"prompt_token_ids": [LETTERS[index % 8], *LETTERS[: 3 + index % 3]]} for index in range(len(chosen))]
    return prompts, params


def answers(llm: LLM, budgets: list[int | None]) -> list[Any]:
    prompts, params = requests(llm, budgets)
    results = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check()
    return [(result.outputs, result.error) for result in results]


BUDGETS = [None, 0, 1, 5]


def check_thoughts(prompt: str, text: str, budget: int) -> int:
    """Check every thought in a text of single bytes; returns the number of those that were ended."""
    inside, ended = prompt.rfind("c") > prompt.rfind("dgh"), 0
    at = int(inside and text.startswith("c"))  # the model may repeat the mark of the prompt
    while at < len(text):
        if not inside:
            at = text.find("c", at) + 1
            if at == 0:
                break
        inside = False
        end = text.find("dgh", at)
        length = (len(text) if end < 0 else end) - at
        assert length <= budget + (end < 0) * 2, (prompt, text, budget)
        ended += end >= 0 and length == budget
        at = len(text) if end < 0 else end + 3
    return ended


def test_every_thought_has_at_most_its_tokens(tiny_model):
    llm = load(tiny_model("LlamaForCausalLM"))
    prompts, params = requests(llm, BUDGETS)
    ended = 0
    for prompt, one, (outputs, _) in zip(prompts, params, answers(llm, BUDGETS), strict=True):
        before = llm.tokenizer.decode(prompt["prompt_token_ids"])
        for output in outputs:
            text = llm.tokenizer.decode(output.token_ids)
            if one.thinking_token_budget is not None:
                ended += check_thoughts(before, text, one.thinking_token_budget)
    assert ended > 10


MODES: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 16, "enable_chunked_prefill": True},
    "preempted": {"num_gpu_blocks_override": 34, "block_size": 4},
    "ahead": {"async_scheduling": True},
    "alone": {"max_num_seqs": 1},
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}},
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
    "draft model": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4}},
    "head": {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 4}},
}


@pytest.fixture(scope="module")
def expected(tiny_model) -> list[Any]:
    return answers(load(tiny_model("LlamaForCausalLM", num_hidden_layers=8)), BUDGETS)


@pytest.mark.parametrize("mode", MODES)
def test_no_way_to_run_changes_where_thoughts_end(mode, tiny_model, tmp_path, expected, monkeypatch):
    monkeypatch.setattr(step_costs, "measure_step_costs", lambda *arguments: FREE)
    folder = tiny_model("LlamaForCausalLM", num_hidden_layers=8)
    arguments = dict(MODES[mode])
    if mode == "draft model":
        arguments["speculative_config"] |= {"model": str(folder)}
    if mode == "head":
        write_head(tmp_path)
        arguments["speculative_config"] |= {"model": str(tmp_path)}
    llm = load(folder, **arguments)
    llm.engine.scheduler.max_rows = 100
    assert answers(llm, BUDGETS) == expected
    if mode == "preempted":
        assert llm.engine.stats.preemptions > 0
    if "speculative_config" in arguments:
        assert llm.engine.stats.drafts.drafts > 0
    if mode == "draft model":
        assert llm.engine.stats.drafts.accepted > 20


def test_a_budget_survives_the_encoding_of_messages(tiny_model, expected, behind_bytes):
    llm = behind_bytes(load(tiny_model("LlamaForCausalLM", num_hidden_layers=8)))
    assert answers(llm, BUDGETS) == expected


def test_the_text_before_the_end_of_a_thought_is_that_without_a_budget(tiny_model):
    llm = load(
        tiny_model("LlamaForCausalLM"),
        reasoning_config={"reasoning_start_str": "<think>"} | {"reasoning_end_str": "</think>"},
    )
    prompt = "Why? <think>\n"

    def output(**params: Any) -> Any:
        [result] = llm.generate(
            prompt, SamplingParams(max_tokens=30, ignore_eos=True, logprobs=1, **params), use_tqdm=False
        )
        return result.outputs[0]

    end = llm.tokenizer.encode("</think>", add_special_tokens=False)
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 5}):
        free = output(**sampling)
        for budget in (0, 1, 7):
            limited = output(thinking_token_budget=budget, **sampling)
            assert limited.token_ids[:budget] == free.token_ids[:budget]
            assert limited.token_ids[budget : budget + len(end)] == end
            assert len(limited.token_ids) == 30 and limited.finish_reason == "length"
            forced = limited.logprobs[budget][end[0]]
            assert forced.logprob < 0 and forced.rank > 1, "what the model says about the token"
        assert output(thinking_token_budget=30, **sampling) == free


def test_an_end_comes_whatever_else_forbids_it(tiny_model):
    """As in vLLM: the end of a thought is decided last."""
    llm = load(tiny_model("LlamaForCausalLM"))
    [d, g, h] = llm.tokenizer.encode("dgh", add_special_tokens=False)
    for params in (
        {"allowed_token_ids": [70, 71]},
        {"bad_words": ["d", "dg", "g"]},
        {"logit_bias": {d: -100.0, g: -100.0, h: -100.0}},
        {"logits_processors": [lambda outputs, logits: logits.index_fill_(0, torch.tensor([d, g, h]), -math.inf)]},
        {"min_tokens": 9, "stop_token_ids": [d, g, h]},
    ):
        sampled = SamplingParams(max_tokens=9, temperature=0, thinking_token_budget=1, ignore_eos=True, **params)
        [result] = llm.generate("abc", sampled, use_tqdm=False)
        assert result.outputs[0].token_ids[1:4] == [d, g, h], params


def refusal(llm: LLM, **params: Any) -> AiakqError:
    with pytest.raises(AiakqError) as failure:
        llm.generate("abc", SamplingParams(thinking_token_budget=1, **params), use_tqdm=False)
    return failure.value


def test_a_budget_that_cannot_be_kept_is_refused_by_name(tiny_model):
    llm = load(tiny_model("LlamaForCausalLM"), reasoning_config=None)
    assert "reasoning_config" in refusal(llm).message and refusal(llm).param == "thinking_token_budget"
    with_end = {"reasoning_start_str": "c", "reasoning_end_str": "</s>"}
    llm = load(tiny_model("LlamaForCausalLM"), reasoning_config=with_end)
    assert "also ends the answer" in refusal(llm).message
    assert "no thought before it" in refusal(llm, structured_outputs={"regex": "a+"}).message


@pytest.mark.parametrize("value", [-2, 1.5, True, "1", 2**31 + 1], ids=repr)
def test_other_values_are_refused(value):
    with pytest.raises(AiakqError) as failure:
        SamplingParams(thinking_token_budget=value)
    assert failure.value.param == "thinking_token_budget"
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None


@pytest.mark.parametrize(
    ("start", "end", "mark"),
    [
        ("<think>", "</think>", "</think>"),
        ("<think>", "Time is up.\n</think>\n\n", "</think>"),
        ("[THINK]", "Stop.[/THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "So:<|END_THINKING|>", "<|END_THINKING|>"),
        ("◁think▷", "◁/think▷", "◁/think▷"),
        ("(", "done)", "done)"),
    ],
)
def test_the_mark_within_the_text_that_ends_thoughts_is_found(start, end, mark):
    marks = configured_marks({"reasoning_start_str": start, "reasoning_end_str": end})
    assert marks == ThoughtMarks((start,), (mark,), end)
    assert configured_marks({"think_start_str": start, "think_end_str": end}) == marks


def test_a_config_completes_the_marks_of_the_parser():
    assert configured_marks(None, THINK) == configured_marks({"reasoning_start_str": "<think>"}, THINK) == THINK
    words = configured_marks({"reasoning_end_str": "So.</think>\n\n", "reasoning_parser": "qwen3"}, THINK)
    assert words == ThoughtMarks(("<think>",), ("</think>",), "So.</think>\n\n")
    assert configured_marks({"reasoning_end_str": "</think>"}) is None


@pytest.mark.parametrize(
    "config",
    [
        {"reasoning_end_str": "Stop."},
        {"reasoning_end_str": "</think> and more"},
        {"reasoning_end_str": "</think></think>"},
        {"reasoning_end_str": "</think>\n\n\n\n\n"},
        {"reasoning_start_str": "<thought>"},
        {"reasoning_start_str": 3},
        {"reasoning_end_str": " "},
        {"end": "</think>"},
        {"reasoning_start_str": "<think>", "think_start_str": "<thought>"},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_the_parser_is_refused(config):
    with pytest.raises(AiakqError) as failure:
        configured_marks(config, THINK)
    assert "--reasoning-config" in failure.value.message
