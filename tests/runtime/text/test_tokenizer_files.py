"""A tokenizer that cannot be read: the file is named, and what to do."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.runtime.text.tokenizer_files import check_encoding, check_settings, has_tokenizer, unused_template


def test_a_missing_tokenizer_is_reported(example_model, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(example_model / name, tmp_path / name)
    assert has_tokenizer(example_model) and not has_tokenizer(tmp_path)
    with pytest.raises(AiakqError) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.id == "tokenizer_missing"
    assert "--tokenizer" in str(caught.value) and "--skip-tokenizer-init" in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_the_damaged_file_is_named(example_model, tmp_path, name):
    shutil.copytree(example_model, tmp_path / "model")
    (tmp_path / "model" / name).write_text('{"broken": ')
    with pytest.raises(AiakqError) as caught:
        Tokenizer.load(tmp_path / "model")
    assert caught.value.id == "model_malformed" and name in str(caught.value)
    assert "it is not JSON" in str(caught.value)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("tokenizer_config.json", "chat_template", 5),
        ("tokenizer_config.json", "chat_template", []),
        ("tokenizer_config.json", "chat_template", [{"name": "default"}]),
        ("tokenizer_config.json", "chat_template", {"default": 5}),
        ("chat_template.json", "chat_template", True),
        ("tokenizer_config.json", "eos_token", 7),
        ("special_tokens_map.json", "bos_token", ["<s>"]),
        ("special_tokens_map.json", "pad_token", {"text": "<pad>"}),
        ("tokenizer_config.json", "additional_special_tokens", "<a>"),
        ("tokenizer_config.json", "extra_special_tokens", [5]),
        ("tokenizer_config.json", "added_tokens_decoder", {"x": {"content": "<a>"}}),
        ("tokenizer_config.json", "added_tokens_decoder", {"5": "<a>"}),
        ("tokenizer_config.json", "added_tokens_decoder", {"5": {"content": "<a>", "special": "yes"}}),
        ("tokenizer_config.json", "model_max_length", "4096"),
        ("tokenizer_config.json", "add_bos_token", "no"),
        ("tokenizer_config.json", "padding_side", "top"),
        ("tokenizer_config.json", "tokenizer_class", 5),
        ("added_tokens.json", "<a>", "5"),
    ],
)
def test_a_setting_of_the_wrong_type_is_named_with_its_file(tmp_path, file, key, value):
    (tmp_path / file).write_text(json.dumps({key: value}))
    with pytest.raises(AiakqError, match=f"{file}.*{re.escape(repr(key))} is ") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.id == "model_malformed" and "\n" not in str(caught.value)


def test_a_null_that_transformers_cannot_read_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": null}')
    with pytest.raises(AiakqError, match=r"tokenizer_config.json.*'added_tokens_decoder' is None"):
        check_settings(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"])
def test_a_byte_order_mark_is_named_with_its_file(tmp_path, name):
    (tmp_path / name).write_text('\ufeff{"legacy": false}')
    with pytest.raises(AiakqError, match=rf"{name}.*byte order mark"):
        check_encoding(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/a.jinja"]
)
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_in_another_encoding_is_named(example_model, tmp_path, name, encoding):
    folder = tmp_path / "model"
    shutil.copytree(example_model, folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes('{"chat_template": "Schöne Grüße"}'.encode(encoding))
    with pytest.raises(AiakqError, match=rf"{name}.*(it is not UTF-8 text|utf-8)") as caught:
        Tokenizer.load(folder)
    assert caught.value.id == "model_malformed" and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "is_named"),
    [
        ({"chat_template": "other"}, True),
        ({"chat_template": [{"name": "default", "template": "other"}]}, True),
        ({"chat_template": "used"}, False),
        ({"chat_template": None}, False),
        ({}, False),
    ],
)
def test_a_template_of_a_processor_is_named_if_it_differs(tmp_path, content, is_named):
    assert unused_template(tmp_path, "used") == ""
    (tmp_path / "chat_template.json").write_text(json.dumps(content))
    assert bool(unused_template(tmp_path, "used")) is is_named


def test_settings_of_published_tokenizers_are_accepted(tmp_path):
    token = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "special": True}
    settings = {
        "bos_token": token,
        "eos_token": "</s>",
        "pad_token": None,
        "additional_special_tokens": ["<a>", token],
        "extra_special_tokens": {},
        "added_tokens_decoder": {"5": token},
        "chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
        "model_max_length": 1e30,
        "legacy": None,
        "own_setting": [1, {"a": 2}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    check_settings(tmp_path)
