"""Preparations while a model loads."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from aiakq import SamplingParams
from aiakq.errors import AiakqError
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.server.api.message_format import read_chat_template, template_defaults
from aiakq.server.api.renderer import Renderer
from aiakq.server.loading import _vocabulary_warning
from aiakq.server.process.text_client import TextClient
from aiakq.server.process.text_messages import Loaded, TextReply, TextRequest


def test_chat_template_is_a_file_or_the_text(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert read_chat_template(None) is None
    assert read_chat_template(str(file)) == "{{ messages }}"
    assert read_chat_template("{% if x %}y{% endif %}") == "{% if x %}y{% endif %}"
    with pytest.raises(AiakqError, match="readable file"):
        read_chat_template(str(tmp_path))


def test_a_chat_template_is_neither_waited_for_nor_read_without_end(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, reason in ((tmp_path / "pipe", "named pipe"), ("/dev/zero", "a device"), (tmp_path, "a folder")):
        with pytest.raises(AiakqError, match=reason):
            read_chat_template(str(path))


def test_default_template_arguments_are_checked_at_the_start():
    assert template_defaults(None) == {} and template_defaults({"enable_thinking": False}) == {"enable_thinking": False}
    for name in ("tools", "messages", "not a name"):
        with pytest.raises(AiakqError, match="A key of --default-chat-template-kwargs"):
            template_defaults({name: 1})


@pytest.mark.parametrize("kind", ["pipe", "zeros", "elsewhere"])
def test_a_model_with_something_else_in_place_of_a_file_is_refused(kind, example_model, tmp_path, process):
    """A server neither waits for a pipe nor reads a device, and nothing from outside the folder."""
    folder = shutil.copytree(example_model, tmp_path / "model")
    file = folder / "tokenizer_config.json"
    shutil.move(file, tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero" if kind == "zeros" else tmp_path / "elsewhere")
    ended = process("serve", "--model", folder, "--port", "0")
    assert ended.code == (3 if kind == "pipe" else 4)
    assert "tokenizer_config.json" in ended.last and "Traceback" not in ended.err


def test_tokens_beyond_the_vocabulary_are_a_fault_of_the_operator():
    class Tokens:
        has_text, vocab_size = True, 12

        def raw_tokens(self, ids):
            return [f"<{id}>" for id in ids]

    text = SimpleNamespace(tokenizer=Tokens())
    assert _vocabulary_warning(text, 12) == ""
    warning = _vocabulary_warning(text, 10)
    assert warning.endswith("the model's vocabulary 10: texts with '<10>', '<11>' are refused.")
    renderer: Any = Renderer.__new__(Renderer)
    renderer.tokenizer, renderer.limits = Tokens(), SimpleNamespace(vocab_size=10)
    reply = TextReply(1, counts=[2], token_ids=[[3, 11]])
    with pytest.raises(AiakqError, match="The tokenizer has '<11>' with the id 11") as caught:
        renderer._prompts(["a"], reply, TextRequest(0), SamplingParams())
    assert caught.value.http_status == 500 and caught.value.param is None


def test_structured_output_is_refused_where_a_text_would_end_the_output():
    vocabulary = Vocabulary([bytes([byte]) for byte in range(128)] + [b"<end>"], [128])

    class Tokens:
        special_ids = frozenset([128])

        def raw_tokens(self, ids):
            return [chr(id) for id in ids]

    text = TextClient(None, 1)
    text.tokenizer, text.loaded = Tokens(), Loaded(vocabulary=msgspec.msgpack.encode(vocabulary))
    for ends, expected in (([128], ""), ([128, ord("}")], "the end-of-sequence token 125 is the text '}'"), ([10], "")):
        text.check_ends(ends)
        assert text.end_failure.startswith(expected) and bool(text.end_failure) == bool(expected)
