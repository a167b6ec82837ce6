"""A server of a model in Mistral's own format: conversations become the ids of mistral-common."""

from __future__ import annotations

import httpx
import pytest
from mistral_files import SPECIAL, Reference, write_mistral, write_tekken

from aiakq.runtime.text.mistral_tokenizer import MistralTokenizer
from aiakq.server.background import start_in_background

MESSAGES = [{"role": "system", "content": "hello"}, {"role": "user", "content": "the world [/INST]"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("mistral_common")
    folder = write_tekken(write_mistral(tmp_path_factory.mktemp("mistral") / "model"))
    (folder / "config.json").write_text("{}")  # as releases in both formats have one
    return folder


@pytest.fixture(scope="module")
def http(folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        format = dict.fromkeys(("load_format", "config_format", "tokenizer_mode"), "mistral")
        arguments = {"model": str(folder), "enable_auto_tool_choice": True, "dtype": "float32", **format}
        with (
            start_in_background(arguments, timeout=240) as server,
            httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client,
        ):
            yield client


def test_a_conversation_has_the_ids_of_mistral_common(http, folder):
    _, ids = MistralTokenizer.of(folder).chat_tokens([dict(each) for each in MESSAGES], tools=TOOLS)
    found = http.post("/tokenize", json={"messages": MESSAGES, "tools": TOOLS}).json()
    assert found["tokens"] == ids and found["tokens"].count(SPECIAL.index("[/INST]")) == 1
    request = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 4, "logprobs": True, "temperature": 0}
    answer = http.post("/v1/chat/completions", json=request).json()
    assert answer["usage"]["prompt_tokens"] == len(ids) and answer["usage"]["completion_tokens"] == 4
    # The first token is the likeliest one in the computation of mistral-inference.
    expected = Reference(folder).log_probabilities(ids)[-1]
    assert abs(answer["choices"][0]["logprobs"]["content"][0]["logprob"] - float(expected.max())) < 1e-5


def test_marks_in_the_text_of_a_completion_stay_text(http):
    found = http.post("/tokenize", json={"prompt": "[INST]hello"}).json()["tokens"]
    assert found[0] == SPECIAL.index("<s>") and SPECIAL.index("[INST]") not in found


def test_calls_are_enforced_in_mistrals_syntax(http):
    choice = {"type": "function", "function": {"name": "add"}}
    request = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 64, "tool_choice": choice, "temperature": 0}
    message = http.post("/v1/chat/completions", json=request).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "add"


def test_unknown_variables_are_refused(http):
    request = {"messages": MESSAGES, "max_tokens": 2, "chat_template_kwargs": {"enable_thinking": True}}
    answer = http.post("/v1/chat/completions", json=request)
    assert answer.status_code == 400 and "enable_thinking" in answer.json()["error"]["message"]
