"""A tokenizer that cannot be read: the file is named, and what to do."""

from __future__ import annotations

import shutil

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.runtime.text.tokenizer_files import has_tokenizer


def test_a_missing_tokenizer_is_said_to_be_missing(example_model, tmp_path):
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
