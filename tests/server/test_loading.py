"""What is prepared while a model loads."""

from __future__ import annotations

import os
import shutil

import pytest

from aiakq.errors import AiakqError
from aiakq.server.api.message_format import read_chat_template, template_defaults


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
