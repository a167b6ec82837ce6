"""Agent frameworks against a server, each in an environment of its own: ``make frameworks`` makes them.

AIAKQ_FRAMEWORKS is a folder with a virtual environment for each; what is not there is skipped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from reciting_model import write_model

from aiakq.server.background import RunningServer, start_in_background

TEMPLATE = """{%- if tools %}<tools>{{ tools | tojson }}</tools>
{% endif %}
{%- for message in messages %}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}
{{- message.role }}: {{ message.content or '' }}
{%- endfor %}"""
#: What the model writes behind each of these texts, in the form of Hermes.
SCRIPTS = {
    "<|ask|>": [
        "<tool_call>", '\n{"name": "get_wea', 'ther", "arguments": {', '"city": "Ro', 'me"}}\n', "</tool_call>"
    ],
    "<|rain|>": [
        "<tool_", 'call>\n{"name": "get_ti', 'me", "arguments": {', '"zone": "CE', 'T"}}', "\n</tool_ca", "ll>"
    ],
    "<|noon|>": ["It rains", " at noon."],
}  # fmt: skip
#: Before a server is started for what is not there.
pytestmark = pytest.mark.skipif("AIAKQ_FRAMEWORKS" not in os.environ, reason="not installed: make frameworks")
FOLDER = Path(__file__).parent.parent / "frameworks"
FRAMEWORKS = {"langchain": "langchain_agent.py", "litellm": "litellm_calls.py", "llamaindex": "llamaindex_agent.py"}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models") / "agent"
    write_model(folder, SCRIPTS, TEMPLATE, ("<tool_call>", "</tool_call>"))
    arguments = {"dtype": "float32", "num_gpu_blocks_override": 513, "enable_auto_tool_choice": True}
    arguments |= {"model": str(folder), "served_model_name": ["agent"], "tool_call_parser": "hermes"}
    with start_in_background(arguments, timeout=240) as running:
        yield running


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_agent_calls_tools_and_answers(name, server):
    python = Path(os.environ.get("AIAKQ_FRAMEWORKS", "")) / name / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"{name} is not installed: make frameworks")
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    command = [str(python), "-P", str(FOLDER / FRAMEWORKS[name]), server.url]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-4000:]
