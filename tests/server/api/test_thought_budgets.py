"""thinking_token_budget: thoughts of conversations and texts end after so many tokens, under the names of every API."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from chat_scripts import TEMPLATE
from reciting_model import write_model

from aiakq.runtime.protocol.request import Prompt, Request
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured.compiler import GrammarCompiler
from aiakq.runtime.structured.formats import any_text, regex, tag_grammar_of
from aiakq.runtime.structured.thought_tracker import SpelledBudget, ThoughtTracker
from aiakq.server.api.answer_grammar import Reasoning
from aiakq.server.api.chat_message import message_of
from aiakq.server.api.message_parser import MessageParser
from aiakq.server.api.reasoning_parsers import REASONING_PARSERS
from aiakq.server.api.reasoning_parsers.base import ReasoningParser
from aiakq.server.api.reasoning_parsers.gptoss import GptossReasoningParser
from aiakq.server.background import RunningServer, start_in_background
from aiakq.server.process.request_stream import RequestStream

THOUGHT = ["One ", "two ", "three ", "four ", "five."]
SCRIPTS = {
    "<|thinks|>": ["<think>", *THOUGHT, "</think>", "\n\n", "Six", " seven."],
    "<|opened|>": ["Un ", "deux ", "trois.", "</th", "ink>\nQuatre"],
    "<|twice|>": ["<thi", "nk>eins ", "zwei ", "drei", "</thi", "nk>vier ", "fünf ", "sechs ", "sieben."],
    "<|answers|>": ["Plain ", "text."],
    "<|ends|>": ["<think>Na ", "ja ", "nun ", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'],
    "<|calls|>": ["<think> ich", " rufe ", "auf.", '</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'],
}
ARGUMENTS = {
    "dtype": "float32",
    "num_gpu_blocks_override": 513,
    "served_model_name": ["thinker"],
    "reasoning_parser": "qwen3",
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}}
]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models") / "thinker"
    write_model(folder, SCRIPTS, TEMPLATE, ("<think>", "</think>"))
    with start_in_background({"model": str(folder), **ARGUMENTS}, timeout=240) as running:
        yield running


def post(server: RunningServer, path: str, status: int = 200, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, trust_env=False, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def chat(server: RunningServer, script: str = "thinks", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"<|{script}|>"}]
    return post(server, "/v1/chat/completions", messages=messages, **{"temperature": 0, **fields})


def said(answer: dict[str, Any], index: int = 0) -> tuple[str | None, str | None]:
    message = answer["choices"][index]["message"]
    return message["reasoning"], message["content"]


@pytest.mark.parametrize("budget", [0, 1, 3, 5, 6, 1000, -1, None])
def test_a_thought_has_at_most_the_tokens_of_its_budget(thinker, budget):
    answer = chat(thinker, thinking_token_budget=budget, return_token_ids=True)
    kept = len(THOUGHT) if budget in (None, -1) else min(budget, len(THOUGHT))
    assert said(answer) == ("".join(THOUGHT[:kept]).strip() or None, "Six seven.")
    assert answer["choices"][0]["finish_reason"] == "stop"
    free = chat(thinker, return_token_ids=True)["choices"][0]["token_ids"]
    assert answer["choices"][0]["token_ids"] == [*free[: 1 + kept], *free[1 + len(THOUGHT) :]]
    details = answer["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == (2 + kept if kept else 0)
    assert answer["usage"]["completion_tokens"] == len(free) - len(THOUGHT) + kept


def test_a_stream_and_every_choice_have_the_budget(thinker):
    answer = chat(thinker, thinking_token_budget=2, n=3)
    assert [said(answer, index) for index in range(3)] == [("One two", "Six seven.")] * 3
    body = {"messages": [{"role": "user", "content": "<|thinks|>"}], "stream": True, "thinking_token_budget": 2}
    lines = httpx.post(f"{thinker.url}/v1/chat/completions", json=body, trust_env=False).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line and line != "data: [DONE]"]
    assert "".join(delta.get("reasoning") or "" for delta in deltas).strip() == "One two"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Six seven."


def test_a_thought_of_the_prompt_counts_from_its_first_token(thinker):
    """The prompt ends with the start mark."""
    opened = {"chat_template_kwargs": {"open_thought": True}}
    assert said(chat(thinker, **opened)) == ("".join(THOUGHT), "Six seven.")
    for budget in (0, 2, 4):
        answer = chat(thinker, thinking_token_budget=budget, return_token_ids=True, **opened)
        assert said(answer) == ("".join(THOUGHT[:budget]).strip() or None, "Six seven.")
        assert answer["usage"]["completion_tokens"] == budget + 5


def test_a_prompt_that_has_closed_the_thought_leaves_nothing_to_end(thinker):
    closed = {"chat_template_kwargs": {"closed_thought": True}, "skip_special_tokens": False}
    for script in ("thinks", "answers"):
        assert said(chat(thinker, script, thinking_token_budget=1, **closed)) == said(chat(thinker, script, **closed))


def test_an_answer_without_a_thought_is_not_changed(thinker):
    assert said(chat(thinker, "answers", thinking_token_budget=0)) == (None, "Plain text.")


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "required"}, {"n": 2}], ids=str)
def test_a_budget_that_ends_after_a_call_leaves_it_a_call(thinker, fields):
    for budget in (4, 5, None):
        for choice in chat(thinker, "ends", tools=TOOLS, thinking_token_budget=budget, **fields)["choices"]:
            message = choice["message"]
            assert message["reasoning"] == "Na ja nun" and choice["finish_reason"] == "tool_calls"
            assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    ended = chat(thinker, "ends", tools=TOOLS, thinking_token_budget=4, ignore_eos=True, max_tokens=12)
    assert "<tool_call>" in ended["choices"][0]["message"]["reasoning"], "the reasoning ended with the call"


def test_marks_may_be_split_into_tokens(thinker):
    assert said(chat(thinker, "twice")) == ("eins zwei drei", "vier fünf sechs sieben.")
    assert said(chat(thinker, "twice", thinking_token_budget=5)) == ("eins zwei drei", "vier fünf sechs sieben.")
    assert said(chat(thinker, "twice", thinking_token_budget=3)) == ("eins zwei drei", "Six seven.")
    assert said(chat(thinker, "twice", thinking_token_budget=1)) == ("eins", "Six seven.")


def test_the_limit_of_tokens_may_come_first(thinker):
    answer = chat(thinker, thinking_token_budget=3, max_tokens=3)
    assert said(answer) == ("One two", None) and answer["choices"][0]["finish_reason"] == "length"
    answer = chat(thinker, thinking_token_budget=30, max_tokens=3)
    assert said(answer) == ("One two", None)


def test_log_probabilities_of_an_end_are_those_of_the_model(thinker):
    answer = chat(thinker, thinking_token_budget=1, logprobs=True, top_logprobs=1)
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in tokens[:3]] == ["<think>", "One ", "</think>"]
    assert tokens[2]["top_logprobs"][0]["token"] == "two " and tokens[2]["logprob"] < -1 < tokens[1]["logprob"]


def test_structured_output_begins_after_the_thought(thinker):
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": {"a": 1}}}}
    for budget, thought in ((0, None), (2, "One two")):
        reasoning, content = said(chat(thinker, thinking_token_budget=budget, response_format=format))
        assert reasoning == thought and json.loads(content) == {"a": 1}
    reasoning, content = said(chat(thinker, thinking_token_budget=2, structured_outputs={"choice": ["yes"]}))
    assert (reasoning, content) == ("One two", "yes")


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}], ids=str)
def test_calls_come_after_the_thought(thinker, choice):
    answer = chat(thinker, "calls", tools=TOOLS, tool_choice=choice, thinking_token_budget=1, max_tokens=60)
    message = answer["choices"][0]["message"]
    assert message["reasoning"].strip() == "ich"
    if choice != "auto":
        [call, *_] = message["tool_calls"]
        assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) == {}
    answer = chat(thinker, "calls", tools=TOOLS, tool_choice=choice, thinking_token_budget=9, max_tokens=60)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_thoughts_of_texts_end_too(thinker):
    prompts = ["<|thinks|>", "<think>well <|opened|>", "<think></think><|answers|>"]
    fields = {"temperature": 0, "skip_special_tokens": False, "max_tokens": 5}
    answer = post(thinker, "/v1/completions", prompt=prompts, thinking_token_budget=1, **fields)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["<think>One </think>\n\nSix", "Un </think>\n\nSix seven.", "Plain text."]
    refusal = post(thinker, "/v1/completions", 400, prompt="a", thinking_token_budget=1, guided_regex="a+")["error"]
    assert refusal["param"] == "thinking_token_budget" and "structured output" in refusal["message"]


def test_other_routes_and_names_have_the_budget(thinker):
    expected = ("One two", "Six seven.")
    for fields in (
        {"thinking": {"type": "enabled", "budget_tokens": 2}},
        {"thinking_budget": 2},
        {"thinking_budget_tokens": 2},
        {"reasoning_max_tokens": 2},
        {"reasoning": {"max_tokens": 2}},
        {"custom_params": {"thinking_budget": 2}},
        {"google": {"thinking_config": {"thinking_budget": 2, "include_thoughts": True}}},
        {"nvext": {"max_thinking_tokens": 2}},
    ):
        assert said(chat(thinker, **fields)) == expected, fields
    user = [{"role": "user", "content": "<|thinks|>"}]
    for fields in ({"thinking": {"type": "enabled", "budget_tokens": 2}}, {"thinking_token_budget": 2}):
        blocks = post(thinker, "/v1/messages", messages=user, max_tokens=50, temperature=0, **fields)["content"]
        assert [block.get("thinking") or block.get("text") for block in blocks] == list(expected)
    for fields in ({"thinking_token_budget": 2}, {"reasoning": {"max_tokens": 2}}):
        items = post(thinker, "/v1/responses", input="<|thinks|>", temperature=0, **fields)["output"]
        assert [item["content"][0]["text"] for item in items] == list(expected)


def test_a_field_whose_budget_has_an_effect_is_not_named_as_ignored(thinker):
    user = [{"role": "user", "content": "<|thinks|>"}]
    for path, fields in (
        ("/v1/messages", {"max_tokens": 50, "thinking": {"type": "enabled", "budget_tokens": 2}}),
        ("/v1/messages", {"max_tokens": 50, "thinking": {"type": "adaptive", "budget_tokens": 2}}),
        ("/v1/chat/completions", {"thinking": {"type": "enabled", "budget_tokens": 2}}),
        ("/v1/chat/completions", {"reasoning": {"enabled": True, "max_tokens": 2}}),
    ):
        body = {"messages": user, "temperature": 0, **fields}
        answer = httpx.post(f"{thinker.url}{path}", json=body, trust_env=False)
        assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers
        assert "two" in answer.text and "three" not in answer.text
    body = {"messages": user, "thinking": {"type": "enabled"}, "thinking_token_budget": 2}
    answer = httpx.post(f"{thinker.url}/v1/chat/completions", json=body, trust_env=False)
    assert answer.headers["x-ignored-fields"] == "thinking", "another field has the budget"


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget", "reasoning_budget"])
def test_two_budgets_of_a_request_are_refused(thinker, name):
    user = [{"role": "user", "content": "Hi"}]
    thinking, reasoning = {"type": "enabled", "budget_tokens": 3}, {"max_tokens": 3}
    for path, param, body in (
        ("/v1/messages", "thinking.budget_tokens", {"messages": user, "max_tokens": 9, "thinking": thinking}),
        ("/v1/responses", "reasoning.max_tokens", {"input": "Hi", "reasoning": reasoning}),
        ("/v1/chat/completions", "thinking", {"messages": user, "thinking": thinking, "max_tokens": 9}),
    ):
        refusal = post(thinker, path, 400, **body, **{name: 2})["error"]
        assert "given too, with another value" in refusal["message"]
        assert param in refusal["message"] or name in refusal["message"]
        assert post(thinker, path, **body, **{name: 3})


@pytest.mark.parametrize("value", [-2, 1.5, "3", True, [1]], ids=repr)
def test_other_values_are_refused_by_name(thinker, value):
    user = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": user}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": user, "max_tokens": 9}),
    ):
        refusal = post(thinker, path, 400, thinking_token_budget=value, **body)["error"]
        assert "thinking" in refusal["message"] and "\n" not in refusal["message"]
    thinking = {"type": "enabled", "budget_tokens": value}
    refusal = post(thinker, "/v1/messages", 400, messages=user, max_tokens=9, thinking=thinking)["error"]
    assert "thinking.budget_tokens" in refusal["message"]
    refusal = post(thinker, "/v1/responses", 400, input="Hi", reasoning={"max_tokens": value})["error"]
    assert refusal["param"] == "reasoning.max_tokens"


def test_without_a_reasoning_parser_a_budget_is_refused(server):
    user = [{"role": "user", "content": "Hi"}]
    for path, body in (("/v1/chat/completions", {"messages": user}), ("/v1/completions", {"prompt": "Hi"})):
        refusal = post(server, path, 400, thinking_token_budget=1, **body)["error"]
        assert refusal["param"] == "thinking_token_budget" and "--reasoning-parser" in refusal["message"]
    refusal = post(server, "/v1/chat/completions", 400, messages=user, thinking_budget=1)["error"]
    assert refusal["param"] == "thinking_budget"
    body = {"messages": user, "max_tokens": 1, "thinking": {"type": "enabled", "budget_tokens": 2000}}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, trust_env=False)
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "thinking, thinking.budget_tokens"


def test_routes_that_generate_nothing_ignore_a_budget(thinker):
    user = [{"role": "user", "content": "Hi"}]
    thinking = {"type": "enabled", "budget_tokens": 5}
    assert post(thinker, "/v1/messages/count_tokens", messages=user, thinking=thinking)["input_tokens"] > 0
    assert post(thinker, "/tokenize", messages=user, thinking_token_budget=5)["count"] > 0


# --- in this process


class PlainMarks(ReasoningParser):
    starts, ends = ("<think>",), ("</think>",)


def tokens_of(parser: type[ReasoningParser]) -> list[bytes]:
    marks = parser.thought_marks()
    texts = [bytes([byte]) for byte in range(256)]
    texts += [text.encode() for mark in (*marks.starts, *marks.ends, "ready!", "[1,") for text in (mark, mark[:3])]
    return [*dict.fromkeys(texts), b"<other>", b"<end>"]


@pytest.mark.parametrize("is_open", [False, True], ids=["begins", "open"])
@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "granite", "deepseek_r1"])
def test_a_grammar_allows_every_end_and_parsers_read_it(name, special, is_open):
    """Random texts that the grammar allows, whose thoughts are ended."""
    parser = REASONING_PARSERS.load(name)
    marks, texts = parser.thought_marks(), tokens_of(parser)
    whole = [texts.index(mark.encode()) for mark in (*marks.starts, *marks.ends)]
    vocabulary = Vocabulary(texts, [*(whole if special else []), len(texts) - 2, len(texts) - 1])
    compiler = GrammarCompiler(vocabulary.resized(len(texts), [len(texts) - 1]))
    end_ids = [texts.index(marks.end.encode())] if special else [texts.index(bytes([b])) for b in marks.end.encode()]
    rng, ended = random.Random(3), 0
    for answer in (regex(r"\[1,[0-9]\]"), any_text()):
        part = Reasoning(parser, is_open=is_open).before(answer, "tools", may_end=False)
        for budget in (0, 1, 4):
            matcher = compiler.matcher(tag_grammar_of(part))
            thought = marks.budget(budget, end_ids, is_open=is_open)
            tracker = ThoughtTracker(SpelledBudget(thought, vocabulary))
            text, mask = b"", torch.zeros(matcher.num_words, dtype=torch.int32)
            for step in range(120):
                matcher.fill_mask(mask.data_ptr())
                assert matcher.failure is None, text
                bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
                allowed = [int(i) for i in np.flatnonzero(bits) if i < len(texts) - 1 and texts[i] != b"<other>"]
                starts = [i for i in whole[: len(marks.starts)] if i in allowed]
                token = starts[0] if step == 0 and starts else rng.choice(allowed) if allowed else len(texts) - 1
                if tracker.forced is not None:
                    token, ended = tracker.forced, ended + 1
                    assert bits[token], (text, texts[token])
                matcher.advance(token)
                tracker.add(token)
                if matcher.is_finished or token == len(texts) - 1:
                    break
                text += texts[token]
            message = message_of(
                "assistant", MessageParser(parser(is_open), None).feed(text.decode(errors="replace"), True)
            )
            assert len((message.reasoning or "").encode()) <= max(budget * 30, 0) or not tracker.is_done, text
            if not is_open and tracker.is_done and answer["type"] == "regex":
                assert message.content.startswith("[1,"), text
    assert ended > 0


CHANNELS = [
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "analysis",
    "final",
    "assistant",
    "a",
    "b",
]


def test_every_channel_analysis_of_gpt_oss_has_the_budget():
    parser = GptossReasoningParser
    marks = parser.thought_marks()
    budget = marks.budget(2, [CHANNELS.index("<|end|>")], is_open=False, repeats=True)
    vocabulary = Vocabulary([text.encode() for text in CHANNELS], list(range(5)))
    tracker = ThoughtTracker(SpelledBudget(budget, vocabulary))
    analysis = ["<|channel|>", "analysis", "<|message|>"]
    wanted = [*analysis, "a", "b", *["<|start|>", "assistant", *analysis], "b", "<|call|>", "<|start|>", "assistant"]
    wanted += [*analysis, "a", "a", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "b", "b", "b"]
    text = ""
    for piece in wanted:
        while tracker.forced is not None:
            text += CHANNELS[tracker.forced]
            tracker.add(tracker.forced)
        text += piece
        tracker.add(CHANNELS.index(piece))
    message = message_of("assistant", MessageParser(parser(False), None).feed(text, ended=True))
    assert text.count("ab<|end|>") == 1 and text.count("aa<|end|>") == 1 and text.count("<|end|>") == 2
    assert (message.reasoning, message.content) == ("abbaa", "bbb")


def test_a_parser_that_reads_thoughts_in_its_own_way_has_no_marks():
    class Own(ReasoningParser):
        def parse(self, text, output):
            yield

    assert Own.thought_marks() is None
    assert PlainMarks.thought_marks().end == "</think>"


def test_a_request_that_starts_again_keeps_its_budget():
    from aiakq.runtime.protocol.limits import ModelLimits
    from aiakq.runtime.protocol.sampling_params import SamplingParams
    from aiakq.runtime.text.output_processor import OutputProcessor
    from aiakq.runtime.text.tokenizer import NoTokenizer

    thought = PlainMarks.thought_marks().budget(3, [7], is_open=True)
    processor = OutputProcessor(NoTokenizer(), ModelLimits(99, 99, 99))
    request = Request("r", [Prompt(None, [1, 2], thought)], SamplingParams(max_tokens=9))
    stream = RequestStream(request, lambda stream: None)
    for _ in range(2):
        [prompt] = stream.request.prompts
        [spec] = processor.add("r", prompt, stream.request)
        assert spec.thought == thought
        stream.restart()
    prompt = Prompt(None, [1], thought)
    [spec] = processor.add("s", prompt, Request("s", [prompt], SamplingParams(max_tokens=3)))
    assert spec.thought is None, "it cannot be used up"
