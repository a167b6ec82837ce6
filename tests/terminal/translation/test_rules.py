"""The tables know every option of each program, and lead to options that aiakq serve has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiakq.arguments.commands import COMMANDS
from aiakq.terminal.translation.llama_server import LLAMA_SERVER
from aiakq.terminal.translation.ollama import OLLAMA
from aiakq.terminal.translation.rules import IGNORED, KEPT, LOST
from aiakq.terminal.translation.sglang import SGLANG
from aiakq.terminal.translation.vllm import vllm

#: All options of SGLang (fields of its ServerArgs), llama-server (README of tools/server) and Ollama (api/types.go,
#: parser.go, envconfig), extracted from the sources of the named versions.
OPTIONS = json.loads((Path(__file__).parent / "options.json").read_text())
VLLM = json.loads((Path(__file__).parents[2] / "arguments" / "vllm_options.json").read_text())
TOOLS = [vllm(), SGLANG, LLAMA_SERVER, OLLAMA]


def test_every_option_of_vllm_has_a_rule():
    known = vllm().by_flag
    for version in ("serve 0.7.3", "serve 0.33.0"):
        assert [flag for flag in VLLM[version] if flag not in known] == []


@pytest.mark.parametrize("tool", [SGLANG, LLAMA_SERVER, OLLAMA], ids=lambda tool: tool.name)
def test_every_option_has_a_rule(tool):
    (names,) = (OPTIONS[key] for key in OPTIONS if key.startswith(tool.name) and "'" not in key)
    assert [name for name in names if name not in tool.by_flag] == []


def test_every_variable_of_ollama_has_a_rule():
    assert set(OPTIONS["Ollama's variables"]) <= OLLAMA.variables.keys()


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_rules_lead_to_options_or_have_a_reason(tool):
    rows = {
        flag: row
        for row in COMMANDS["serve"].rows
        for flag in (*row.all_flags, row.off_flag if row.type is bool else "")
    }
    for rule in tool.rules:
        assert rule.status in (KEPT, IGNORED, LOST)
        if rule.status == KEPT:
            assert rule.to == "MODEL" or rule.to in rows or rule.to in ("--nnodes", "--config"), rule
            assert not rule.key or rows[rule.to].type is dict, rule
        else:
            assert 5 < len(rule.reason) < 160 and not rule.reason.endswith("."), rule
    for to, _ in tool.variables.values():
        assert to in tool.by_flag or to in (IGNORED, LOST)
    assert all(assumed.to in rows for assumed in tool.assumed)


@pytest.mark.parametrize("tool", [LLAMA_SERVER, OLLAMA], ids=lambda tool: tool.name)
def test_a_flag_has_one_rule(tool):
    flags = [flag for rule in tool.rules for flag in rule.flags]
    assert sorted(flags) == sorted(set(flags))
