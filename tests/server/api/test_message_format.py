"""The selection of a server's parsers."""

from __future__ import annotations

from typing import Any

import pytest

from aiakq.arguments.server import checked
from aiakq.errors import AiakqError
from aiakq.runtime.protocol.thought_budget import ThoughtMarks
from aiakq.server.api.message_format import ParserOptions
from aiakq.server.api.message_parser import MessageFormat
from aiakq.server.api.reasoning_parsers import REASONING_PARSERS
from aiakq.server.api.tool_parsers import TOOL_PARSERS

OWN = """
from aiakq.server.api.reasoning_parsers.base import ReasoningParser
from aiakq.server.api.tool_parsers.hermes import HermesParser

class Mine(HermesParser):
    template_marks = ("<mine>",)

class Thoughts(ReasoningParser):
    starts, ends = ("(",), (")",)

TOOL_PARSERS = {"mine": Mine}
REASONING_PARSERS = {"thoughts": Thoughts}
"""


def format_of(template: str = "", **given: Any) -> MessageFormat:
    return ParserOptions(checked({"model": "m", **given}, server=True)).message_format(template)


#: Beginnings of what real templates hold, and the parsers they need.
TEMPLATES = [
    ('<tools>{{ tools | tojson }}</tools> <tool_call>{"name": <function-name>}</tool_call>', "hermes"),
    ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder"),
    ("<tool_call>{function-name}\n<arg_key>{key}</arg_key>", "glm45"),
    ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
    ("<|action_start|><|plugin|>", "internlm"),
    ("<tool_calls>[", "jamba"),
    ("functools[", "phi4_mini_json"),
    ("<function_call>", "granite-20b-fc"),
    ("<|tool_call|>", "granite"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("Respond in the format [func_name1(params_name1=params_value1)]", "pythonic"),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES, ids=[name for _, name in TEMPLATES])
def test_parsers_are_named_or_found_from_the_template(template, name):
    found = format_of(template, enable_auto_tool_choice=True)
    assert found.tool_parser is TOOL_PARSERS.load(name) and found.auto_tool_choice
    named = format_of(template, enable_auto_tool_choice=True, tool_call_parser="llama4_json")
    assert named.tool_parser is TOOL_PARSERS.load("llama4_json")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '</think>' }}", "qwen3"),
        ("[gMASK]<sop> </think>", "glm45"),
        ("<｜Assistant｜> </think>", "deepseek_r1"),
        ("[THINK]", "mistral"),
        ("Here is my thought process: ... Here is my response:", "granite"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "gptoss"),
    ],
)
def test_reasoning_parsers_are_found_from_the_template(template, name):
    assert format_of(template, enable_reasoning=True).reasoning_parser is REASONING_PARSERS.load(name)
    assert format_of(template, reasoning_parser="granite").reasoning_parser is REASONING_PARSERS.load("granite")


def test_nothing_is_parsed_by_default():
    assert format_of("<tool_call> </think>") == MessageFormat()


def test_parsers_of_the_operators_own_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    options = {"tool_parser_plugin": str(file), "reasoning_parser_plugin": str(file)}
    named = format_of(tool_call_parser="mine", reasoning_parser="thoughts", **options)
    assert named.tool_parser.__name__ == "Mine" and named.reasoning_parser.__name__ == "Thoughts"
    found = format_of("<tool_call> <mine>", enable_auto_tool_choice=True, **options)
    assert found.tool_parser.__name__ == "Mine"


@pytest.mark.parametrize(
    ("given", "id", "option"),
    [
        ({"tool_call_parser": "nothing"}, "bad_option", "--tool-call-parser"),
        ({"reasoning_parser": "nothing"}, "bad_option", "--reasoning-parser"),
        ({"enable_auto_tool_choice": True}, "no_parser", "--tool-call-parser"),
        ({"enable_reasoning": True}, "no_parser", "--reasoning-parser"),
        ({"tool_call_parser": "hermes", "tool_parser_plugin": "no/such/file.py"}, "bad_option", "--tool-parser-plugin"),
    ],
)
def test_what_cannot_be_used_is_refused(given, id, option):
    with pytest.raises(AiakqError) as caught:
        format_of("{{ messages }}", **given)
    assert caught.value.id == id and caught.value.fields["option"] == option


def test_a_file_of_something_else_is_refused(tmp_path):
    file = tmp_path / "own.py"
    for text in ("1 / 0", "TOOLS = {}", "TOOL_PARSERS = {'mine': int}"):
        file.write_text(text)
        with pytest.raises(AiakqError) as caught:
            format_of(tool_call_parser="mine", tool_parser_plugin=str(file))
        assert caught.value.id in ("bad_option", "plugin")


def test_the_marks_of_thoughts_are_those_of_the_parser_or_the_option(tmp_path):
    assert format_of(reasoning_parser="qwen3").thought_marks == ThoughtMarks(("<think>",), ("</think>",), "</think>")
    words = {"reasoning_end_str": "Time is up.[/THINK]"}
    assert format_of(reasoning_parser="mistral", reasoning_config=words).thought_marks.end == "Time is up.[/THINK]"
    assert format_of(reasoning_parser="gptoss").thought_marks.anywhere
    both = {"reasoning_start_str": "(", "reasoning_end_str": ")"}
    assert format_of(reasoning_config=both).thought_marks == ThoughtMarks(("(",), (")",), ")")
    assert format_of().thought_marks is None
    with pytest.raises(AiakqError, match="end mark of the reasoning parser"):
        format_of(reasoning_parser="granite", reasoning_config={"reasoning_end_str": "</think>"})
