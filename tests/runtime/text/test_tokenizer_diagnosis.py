"""A tokenizer that transformers cannot read: one line with the file and the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.text.tokenizer import Tokenizer

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n"
VOCAB = {"<unk>": 0, "h": 1, "e": 2, "he": 3}
GPT2 = {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}}


def refused(folder: Path) -> AiakqError:
    with pytest.raises(AiakqError) as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return caught.value


def write(folder: Path, files: dict[str, Any]) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "named", "said"),
    [
        ({"tokenizer.model": b"xx"}, "tokenizer.model", "not a SentencePiece model"),
        ({"tokenizer.model": b""}, "tokenizer.model", "empty"),
        ({"tokenizer.model": LFS}, "tokenizer.model", "git-lfs pointer"),
        ({"tokenizer.model": "YQ== 0\nYg== 1\n"}, "tokenizer.model", "tiktoken"),
        ({"tokenizer.json": LFS}, "tokenizer.json", "git-lfs pointer"),
        ({"tokenizer.json": "{}"}, "tokenizer.json", "has no 'added_tokens'"),
        ({"tokenizer.json": b"\xef\xbb\xbf{}"}, "tokenizer.json", "byte order mark"),
        ({"tokenizer_config.json": "{}".encode("utf-16"), "tokenizer.json": "{}"}, "_config.json", "not UTF-8"),
        ({"vocab.json": VOCAB, **GPT2}, "merges.txt", "is missing"),
        ({"merges.txt": "h e\n", **GPT2}, "vocab.json", "is missing"),
        ({"vocab.json": {"h": "1", "e": "2"}, "merges.txt": "h e\n", **GPT2}, "vocab.json", "not a token id"),
        ({"vocab.json": VOCAB, "merges.txt": "#version: 0.2\nh x\n", **GPT2}, "merges.txt", "line 2"),
        ({"vocab.json": VOCAB, "merges.txt": "h e\n"}, "tokenizer_config.json", "tokenizer_class"),
    ],
    ids=str,
)
def test_the_file_and_the_reason_are_named(tmp_path, files, named, said):
    problem = refused(write(tmp_path, files))
    assert named in str(problem) and said in str(problem)


@pytest.mark.parametrize("part", ["pre_tokenizer", "model"])
def test_a_part_that_the_tokenizers_package_does_not_know_is_named(example_model, tmp_path, part):
    shutil.copytree(example_model, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: {"type": "OfNextYear"}}))
    problem = str(refused(tmp_path / "model"))
    assert "tokenizer.json" in problem and {"pre_tokenizer": "PreTokenizer", "model": "Model"}[part] in problem


def test_a_tokenizer_in_a_folder_inside_is_pointed_to(example_model, tmp_path):
    write(tmp_path, {})
    assert refused(tmp_path).id == "tokenizer_missing" and "but its folder" not in str(refused(tmp_path))
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(example_model / "tokenizer.json", tmp_path / "tokenizer")
    assert "but its folder 'tokenizer' has one" in str(refused(tmp_path))


def test_settings_without_a_vocabulary_are_no_tokenizer(tmp_path):
    assert refused(write(tmp_path, {"tokenizer_config.json": {"eos_token": "</s>"}})).id == "tokenizer_missing"


def test_a_pair_of_vocabulary_and_merges_is_read(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, {"vocab.json": VOCAB, "merges.txt": "#version: 0.2\nh e\n", **GPT2}))
    assert tokenizer.encode("heh") == [3, 1]
