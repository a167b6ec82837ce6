"""Messages parsed token by token: any grouping of the tokens into steps gives the same events."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_examples import examples
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from aiakq.runtime.text.detokenizer import Detokenizer
from aiakq.runtime.text.tokenizer import Tokenizer as TextTokenizer
from aiakq.server.api.chat_message import message_of
from aiakq.server.api.message_parser import MessageParser, ReasoningTokens
from aiakq.server.api.reasoning_parsers import REASONING_PARSERS
from aiakq.server.api.tool_parsers import TOOL_PARSERS

TOOLS = {"f": {"type": "object", "properties": {"city": {"type": "string"}}}}
#: A call in every form: "{}" is text that each format allows in a string.
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"city": "é 🙂"}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "f", "parameters": {"city": "é 🙂"}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"city": "é 🙂"}}]',
    "pythonic": "[f(city='é 🙂')]",
    "llama4_pythonic": "<|python_start|>[f(city='é 🙂')]<|python_end|>",
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"city": "é 🙂"}}]',
    "granite-20b-fc": '<function_call> {"name": "f", "arguments": {"city": "é 🙂"}}',
    "internlm": '<|action_start|><|plugin|>\n{"name": "f", "parameters": {"city": "é 🙂"}}<|action_end|>',
    "jamba": '<tool_calls>[{"name": "f", "arguments": {"city": "é 🙂"}}]</tool_calls>',
    "phi4_mini_json": 'functools[{"name": "f", "arguments": {"city": "é 🙂"}}]',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=city>\né 🙂\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>é 🙂</arg_value>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"city": "é 🙂"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"city": "é 🙂"}<|tool_call_end|><|tool_calls_section_end|>',
}
THINKING = ("<think>", "</think>")


def tokenizer_of(marks: list[str]) -> TextTokenizer:
    """A token per byte, and one per mark, which is special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner))


def parsed(name: str, tokenizer: TextTokenizer, steps: list[list[int]]) -> tuple[Any, int]:
    """The message, and the number of its tokens that are reasoning."""
    parser = MessageParser(REASONING_PARSERS.load("qwen3")(False), TOOL_PARSERS.load(name)(TOOLS), "seed")
    counted = ReasoningTokens(parser, lambda id: len(tokenizer.token_bytes(id)))
    stream = Detokenizer(tokenizer, [], True, kept_special_tokens=frozenset(tokenizer.special_ids))
    events = []
    for tokens in steps:
        counted.add(tokens)
        events += parser.feed("".join(map(stream.push, tokens)))
    events += parser.feed(stream.flush(), ended=True)
    return message_of("assistant", events), counted.count


def test_every_format_has_a_call():
    classes = {TOOL_PARSERS.load(name) for name in TOOL_PARSERS if name not in ("gptoss", "openai")}
    assert {TOOL_PARSERS.load(name) for name in CALLS} == classes


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=examples(50))
@given(data=st.data())
def test_any_grouping_of_tokens_gives_the_same(name, data):
    """As several tokens of a step do with speculative decoding; marks are special tokens or spelled in bytes."""
    marks = [*THINKING, *TOOL_PARSERS.load(name).marks]
    tokenizer = tokenizer_of(data.draw(st.sampled_from([marks, []])))
    text = f"<think>Hm, é.</think>{CALLS[name]}"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1), max_size=8)))
    steps = [tokens[first:end] for first, end in pairwise([0, *cuts, len(tokens)])]
    message, num_reasoning = parsed(name, tokenizer, steps)
    assert (message, num_reasoning) == parsed(name, tokenizer, [[token] for token in tokens])
    assert message.reasoning == "Hm, é." and message.content is None
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"city": "é 🙂"}')
    thought = tokenizer.encode("<think>Hm, é.</think>", add_special_tokens=False)
    assert num_reasoning == len(thought)
