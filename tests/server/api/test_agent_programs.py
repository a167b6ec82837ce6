"""Codex and Claude Code, the programs, against a server: each calls its shell, and answers from the output."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from reciting_model import write_model

from aiakq.server.background import RunningServer, start_in_background

#: What the model writes depends on the last text of the user or of a tool, which the prompt holds before the mark.
TEMPLATE = """{%- if tools %}<tools>{{ tools | length }}</tools>{% endif %}
{%- for message in messages if message.role in ('user', 'tool') %}{% if loop.last %}{% set last = message.content %}
{{- last }}{%- for call in messages[-1].tool_calls or [] %}{{ call.function.name }}{% endfor %}
{%- for mark in ('<|note|>', '<|codex|>', '<|claude|>') if mark in last %}{{ mark }}{% endfor %}
{%- endif %}{% endfor %}"""
SCRIPTS = {
    "<|claude|>": [
        "<tool_call>",
        '{"name": "Bash", "arguments": ',
        '{"command": "cat note.txt"}',
        "}\n",
        "</tool_call>",
    ],
    "<|codex|>": [
        "<tool_",
        "call>",
        '{"name": "exec_command", "arguments"',
        ': {"cmd": "cat note.txt"}}',
        "</tool_c",
        "all>",
    ],
    "<|note|>": ["The note says", " that all is well."],
}
#: Before a server is started for what is not there.
pytestmark = pytest.mark.skipif("AIAKQ_FRAMEWORKS" not in os.environ, reason="not installed: make frameworks")
#: Absolute: the programs run in another folder.
FOLDER = Path(os.environ.get("AIAKQ_FRAMEWORKS", "")).resolve() / "programs" / "node_modules" / ".bin"
CODEX = """
model = "agent"
model_provider = "aiakq"
[model_providers.aiakq]
name = "aiakq"
base_url = "{url}/v1"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models") / "agent"
    write_model(folder, SCRIPTS, TEMPLATE, ("<tool_call>", "</tool_call>"), context=65536)
    arguments = {"dtype": "float32", "num_gpu_blocks_override": 4097, "enable_auto_tool_choice": True}
    arguments |= {"model": str(folder), "served_model_name": ["agent"], "tool_call_parser": "hermes"}
    with start_in_background(arguments, timeout=240) as running:
        yield running


def answer_of(name: str, arguments: list[str], home: Path, **environment: str) -> str:
    """What a program writes, in a folder with a note."""
    if not (FOLDER / name).exists():
        pytest.skip(f"{name} is not installed: make frameworks")
    work = home / "work"
    work.mkdir(parents=True)
    (work / "note.txt").write_text("All is well. <|note|>\n")
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    command = [str(FOLDER / name), *arguments]
    options = {"capture_output": True, "text": True, "timeout": 300, "stdin": subprocess.DEVNULL}
    ended = subprocess.run(command, cwd=work, env=kept | {"HOME": str(home)} | environment, **options)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


def test_codex_calls_its_shell_and_answers(server, tmp_path):
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(CODEX.format(url=server.url))
    written = answer_of("codex", ["exec", "--skip-git-repo-check", "What does the note say? <|codex|>"], tmp_path)
    assert written.strip().endswith("The note says that all is well.")


def test_claude_code_calls_its_shell_and_answers(server, tmp_path):
    arguments = ["-p", "What does the note say? <|claude|>", "--allowedTools", "Bash(cat:*)"]
    arguments += ["--output-format", "stream-json", "--verbose"]
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ANTHROPIC_SMALL_FAST_MODEL": "agent"}
    account = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": "agent"}
    lines = [json.loads(line) for line in answer_of("claude", arguments, tmp_path, **account, **quiet).splitlines()]
    calls = [
        block["input"]["command"]
        for line in lines
        if line["type"] == "assistant"
        for block in line["message"]["content"]
        if block["type"] == "tool_use"
    ]
    assert calls == ["cat note.txt"]
    assert lines[-1]["result"] == "The note says that all is well." and lines[-1]["num_turns"] == 2
