"""user_path: homes, and those of users who do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

import aiakq
from aiakq.errors import AiakqError
from aiakq.formats.hub import resolve_model
from aiakq.system.user_path import user_path
from aiakq.terminal.chat_images import image_url


def test_the_home_of_a_user_who_does_not_exist_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a") == tmp_path / "a"
    assert user_path("~no-such-user/a") == Path("~no-such-user/a")


def test_a_home_that_is_not_there_is_a_mistake_of_the_user():
    with pytest.raises(AiakqError, match="--image is '~no-such-user/a.png'"):
        image_url("~no-such-user/a.png", "--image")
    with pytest.raises(AiakqError, match="no-such-user"):
        resolve_model("~no-such-user/model", None, None, weights="none")


def test_no_module_uses_a_function_that_fails_for_it():
    folder = Path(aiakq.__file__).parent
    users = [path.name for path in folder.rglob("*.py") if ".expanduser()" in path.read_text(encoding="utf-8")]
    assert users == []
