"""Chat templates that cannot be used: the operator's end the start, the model's own are named in every answer."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.text.tokenizer_source import TokenizerSource
from aiakq.server.loading import _template_warnings
from aiakq.server.process import template_checks
from aiakq.server.process.template_checks import checked_template
from aiakq.server.process.text_client import TextClient
from aiakq.server.process.text_messages import TextRequest

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def source_with(example_model: Path, tmp_path: Path) -> Callable[..., TokenizerSource]:
    """``source_with(template, **files)`` -> the example model's tokenizer with this template and these files."""

    def make(template: Any, files: dict[str, bytes] | None = None) -> TokenizerSource:
        folder = tmp_path / "model"
        shutil.copytree(example_model, folder)
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        file = folder / "tokenizer_config.json"
        given = {} if template is None else {"chat_template": template}
        config = {name: value for name, value in json.loads(file.read_text()).items() if name != "chat_template"}
        file.write_text(json.dumps(config | given))
        for name, content in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        return TokenizerSource(str(folder))

    return make


def loaded(source: TokenizerSource, *options: Any, use: Any = None) -> TextClient:
    async def whole() -> TextClient:
        client = TextClient(*(options or (None, 1 << 20)))
        try:
            await client.load(source)
            if use is not None:
                await use(client)
        finally:
            await client.stop()
        return client

    return asyncio.run(whole())


async def rendered(client: TextClient, messages: list[dict[str, Any]] = HI, **arguments: Any) -> str:
    return (await client.run(TextRequest(0, messages=messages, arguments=arguments))).text


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for m in messages %}\n{{ m.content }}", "'t.jinja' of --chat-template cannot be used: line 2: "),
        ("{% summon messages %}", "'t.jinja' of --chat-template cannot be used: line 1: "),
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "cannot be used: it is a git-lfs pointer, not the file",
        ),
        ("{{ 'Hello' }}", "'t.jinja' of --chat-template leaves out the text of users"),
        (
            "{% for m in messages %}{{ mesage.content }}{% endfor %}",
            "fails for every conversation: 'mesage' is undefined",
        ),
    ],
)
def test_a_template_of_the_operator_ends_the_start(example_model, template, says):
    with pytest.raises(AiakqError, match=says) as caught:
        loaded(TokenizerSource(str(example_model)), template, 1 << 20, False, "auto", "'t.jinja' of --chat-template")
    assert "\n" not in str(caught.value)


def test_a_template_of_the_model_that_does_not_compile_is_named(source_with):
    source = source_with("{% if %}")

    async def use(client: TextClient) -> None:
        with pytest.raises(AiakqError, match="model' cannot be used: line 1: ") as caught:
            await rendered(client)
        assert caught.value.http_status == 500
        assert (await client.encode(["Hi"])).counts == [2], "everything else works"

    client = loaded(source, use=use)
    [warning] = _template_warnings(client)
    assert "line 1: " in warning and "Chat requests are refused." in warning


def test_a_template_of_the_model_that_loses_the_text_of_users_ends_the_start(source_with):
    client = loaded(source_with("{{ messages[0].text }}"))
    with pytest.raises(AiakqError, match="leaves out the text of users"):
        list(_template_warnings(client))


def test_a_template_of_the_model_that_always_fails_is_named(source_with):
    client = loaded(source_with("{% for m in messages %}{{ mesage.content }}{% endfor %}"))
    [warning] = _template_warnings(client)
    assert "'mesage' is undefined" in warning and "Chat requests are refused." in warning


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[-1].content }}", "does not show all turns of a conversation"),
        ("{{ raise_exception('one') if messages[0].role != 'x' }}" + PLAIN, "refuses every conversation .*: one"),
        ("{% for m in messages %}{{ m.content if m.role == 'user' else n.x }}{% endfor %}", "of the role assistant: "),
        ("{% for t in tools %}{{ t.functoin.name }}{% endfor %}" + PLAIN, "fails for conversations with tools: "),
    ],
)
def test_conversations_that_a_template_does_not_take_are_named_at_the_start(source_with, template, says):
    assert any(re.search(says, warning) for warning in _template_warnings(loaded(source_with(template))))


def test_a_template_is_checked_with_the_default_arguments(example_model):
    needs = "{% for m in messages %}{{ m.content + suffix }}{% endfor %}"
    options = (needs, 1 << 20, False, "auto", "of the test")
    assert loaded(TokenizerSource(str(example_model)), *options, {"suffix": "!"}).has_template
    with pytest.raises(AiakqError, match="'suffix' is undefined"):
        loaded(TokenizerSource(str(example_model)), *options)


def test_facts_outlive_a_restart_of_the_process(source_with, monkeypatch):
    source = source_with("{% for m in messages %}{{ m.content[0].text }}{% endfor %}")

    async def use(client: TextClient) -> None:
        assert await rendered(client) == "Hi"
        facts = client.loaded.template_facts
        await client.stop()
        assert await rendered(client) == "Hi"
        assert client.loaded.template_facts == facts and facts[0].forms["user"] == ["part"]

    loaded(source, use=use)


def test_a_form_chosen_by_the_operator_reaches_the_template(example_model):
    template = "{% for m in messages %}{{ m.content is string }} {{ m.content }}{% endfor %}"

    async def use(client: TextClient) -> None:
        assert await rendered(client) == "True Hi"

    loaded(TokenizerSource(str(example_model)), template, 1 << 20, False, "string", use=use)


def test_a_template_that_loops_or_swells_is_used_without_facts(monkeypatch):
    monkeypatch.setattr(template_checks, "MAX_SECONDS", 0.5)
    template = checked_template(LOOP + PLAIN, {}, "auto", "of the test", lambda: None)
    assert template.facts.forms == {} and template.facts.takes_tools
    template = checked_template(LOOP + PLAIN, {}, "openai", "of the test", lambda: None)
    assert template.facts.forms["user"] == ["openai"]


def named(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": text} for name, text in templates.items()]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOLS = (
    PLAIN + "{% for t in tools %}<{{ t.function.name }}>{{ t.function.description }}"
    "{{ t.function.parameters.properties | join }}{% endfor %}"
)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
def test_named_templates_without_a_default_serve_the_conversations_they_are_for(source_with, place):
    files = {"additional_chat_templates/tool_use.jinja": WITH_TOOLS.encode()}
    source = source_with(named(tool_use=WITH_TOOLS)) if "config" in place else source_with(PLAIN, files)

    async def use(client: TextClient) -> None:
        assert await rendered(client, tools=[TOOL]) == "Hi<add>"
        with pytest.raises(AiakqError, match="'tool_use'.* none of them is the default") as caught:
            await rendered(client)
        assert caught.value.id == "no_default_template" and caught.value.http_status == 400
        assert "--chat-template FILE" in str(caught.value) and "\n" not in str(caught.value)
        await client.stop()
        assert await rendered(client, tools=[TOOL]) == "Hi<add>", "also after the process was restarted"

    client = loaded(source, use=use)
    [warning] = _template_warnings(client)
    assert "Chat requests without tools are refused." in warning


def test_templates_of_which_transformers_uses_none_are_named_in_one_line(source_with):
    async def use(client: TextClient) -> None:
        for arguments in ({}, {"tools": [TOOL]}):
            with pytest.raises(AiakqError, match="'rag', 'x'"):
                await rendered(client, **arguments)

    client = loaded(source_with(named(rag=PLAIN, x=PLAIN)), use=use)
    [warning] = _template_warnings(client)
    assert " Chat requests are refused." in warning


def test_a_template_for_tools_that_does_not_compile_leaves_other_conversations(source_with):
    async def use(client: TextClient) -> None:
        assert await rendered(client) == "Hi"
        with pytest.raises(AiakqError, match="cannot be used: line 1: "):
            await rendered(client, tools=[TOOL])

    client = loaded(source_with(named(default=PLAIN, tool_use="{% if %}")), use=use)
    [warning] = _template_warnings(client)
    assert "Chat requests with tools are refused." in warning


def test_a_form_that_the_template_of_the_model_does_not_take_ends_the_start(source_with):
    source = source_with("{% for m in messages %}{{ m.content[0].text }}{% endfor %}")
    with pytest.raises(AiakqError, match="--chat-template-content-format string") as caught:
        loaded(source, None, 1 << 20, False, "string")
    assert caught.value.id == "template_form" and "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "--chat-template"])
def test_a_byte_order_mark_of_a_template_does_not_reach_prompts(source_with, place):
    marked = "\ufeff" + PLAIN
    files = {"chat_template.jinja": marked.encode()} if place.endswith("jinja") else {}
    source = source_with(marked if "config" in place else PLAIN, files)

    async def use(client: TextClient) -> None:
        assert await rendered(client) == "Hi"

    loaded(source, marked if place.startswith("--") else None, 1 << 20, use=use)


def test_a_template_of_a_processor_is_named_and_not_used(source_with):
    files = {"chat_template.json": json.dumps({"chat_template": "{{ 'other' }}" + PLAIN}).encode()}

    async def use(client: TextClient) -> None:
        assert await rendered(client) == "Hi"

    [warning] = _template_warnings(loaded(source_with(PLAIN, files), use=use))
    assert "chat_template.json is not used" in warning and "--chat-template FILE" in warning
