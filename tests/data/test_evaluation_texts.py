"""The texts of evaluations: bundled ones by name, and files."""

from pathlib import Path

import pytest

import aiakq.data
from aiakq.data.evaluation_texts import BUNDLED, check_sources, is_bundled, text_names
from aiakq.errors import AiakqError


def test_bundled_texts_are_long_enough_and_differ() -> None:
    texts = {name: aiakq.data.text(file) for name, (file, _) in BUNDLED.items()}
    assert list(texts) == ["prose", "dialogue", "code"]
    assert all(len(text) > 6000 for text in texts.values())
    assert texts["code"].count(";") > 40 and texts["dialogue"].count("?") > 20


def test_a_file_takes_precedence_over_a_bundled_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_bundled("code")
    Path("code").write_text("mine")
    assert not is_bundled("code")


def test_names_are_short_and_unique(tmp_path: Path) -> None:
    assert text_names(["prose", "a/b.txt", "c.txt"]) == ["prose", "b.txt", "c.txt"]
    assert text_names(["a/b.txt", "c/b.txt"]) == ["a/b.txt", "c/b.txt"]


def test_sources_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for sources, id, reason in (
        (["nowhere.txt"], "evaluation_text", "neither a file nor one of the bundled texts"),
        (["code", "code"], "option_conflict", "a text is measured once"),
    ):
        with pytest.raises(AiakqError, match=reason) as caught:
            check_sources(sources)
        assert caught.value.id == id
