"""Rows that are still in a GGUF file: picked, joined and read from one or several parts."""

from __future__ import annotations

import os

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.formats.gguf.decoding import read_blocks, read_weight
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf.file_rows import FileRows
from aiakq.formats.gguf.kinds import KINDS, NUMBERS
from aiakq.formats.gguf.writing import WrittenTensor, write_gguf
from aiakq.kernels.cpu import library, linear
from aiakq.runtime.loader.binding import concatenate

KIND = KINDS[NUMBERS["Q4_0"]]


def blocks(n: int, seed: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randint(0, 60, (n, KIND.row_bytes(64)), generator=make).to(torch.uint8)


ROWS = {"a": blocks(40, 0), "b": blocks(3, 1), "c": blocks(33, 2)}


@pytest.fixture
def file(tmp_path) -> GGUFFile:
    """A model in two files."""
    for number, names in enumerate((("a", "b"), ("c",))):
        written = {name: WrittenTensor("Q4_0", (len(ROWS[name]), 64), lambda name=name: ROWS[name]) for name in names}
        path = tmp_path / f"m-{number + 1:05d}-of-00002.gguf"
        write_gguf(path, {"split.no": number, "split.count": 2, "split.tensors.count": 3}, written)
    return GGUFFile.open(tmp_path / "m-00001-of-00002.gguf")


def test_rows_are_read_in_the_order_that_was_asked_for(file):
    every = FileRows.of(file, "a")
    assert torch.equal(every.read(), ROWS["a"])
    order = torch.tensor([39, 0, 1, 2, 7, 5])
    assert torch.equal(every.select(order).read(), ROWS["a"][order])
    joined = every.select(order).followed_by([FileRows.of(file, "b"), FileRows.of(file, "c")])
    assert torch.equal(joined.read(), torch.cat([ROWS["a"][order], ROWS["b"], ROWS["c"]]))


def test_only_rows_of_the_same_files_are_joined(file, tmp_path):
    other = GGUFFile.open(tmp_path / "m-00001-of-00002.gguf")
    assert FileRows.of(file, "a").followed_by([FileRows.of(other, "b")]) is None


def test_files_without_rows_are_not_opened(file):
    assert [number >= 0 for number in FileRows.of(file, "c").descriptors()] == [False, True]
    file.close()


@pytest.mark.skipif(library.unavailable() is not None, reason="needs the native kernels")
def test_layers_are_packed_from_the_files(file):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    parts = [read_blocks(FileRows.of(file, "a").select(order), KIND, "a")]
    parts += [read_blocks(FileRows.of(file, name), KIND, name) for name in "bc"]
    found, wanted = concatenate(parts), read_weight(torch.cat([ROWS["a"][order], ROWS["b"], ROWS["c"]]), KIND, "all")
    problem, x = wanted.problem(torch.float32, "cpu"), torch.randn(5, 64)
    assert torch.equal(linear.prepare(found, problem)(x), linear.prepare(wanted, problem)(x))
    assert "unpacked" not in vars(found)


def damaged(file: GGUFFile, length: int) -> str:
    """Cut the second file off at ``length`` without anyone noticing from its header, and return its path."""
    path = str(file.path.parent / file.files[1])
    os.truncate(path, length)
    return path


@pytest.mark.skipif(library.unavailable() is not None, reason="needs the native kernels")
def test_a_file_that_is_cut_off_while_it_is_read_is_refused_by_name(file, monkeypatch):
    weight = read_blocks(FileRows.of(file, "c"), KIND, "c")
    damaged(file, os.path.getsize(file.path.parent / file.files[1]) - 100)
    with pytest.raises(AiakqError, match=r"m-00002-of-00002\.gguf.*changed"):
        linear.prepare(weight, weight.problem(torch.float32, "cpu"))
    monkeypatch.setattr(GGUFFile, "_check_unchanged", lambda self, file, current: None)
    with pytest.raises(AiakqError, match=r"m-00002-of-00002\.gguf.*cut off"):
        linear.prepare(weight, weight.problem(torch.float32, "cpu"))


@pytest.mark.skipif(library.unavailable() is not None, reason="needs the native kernels")
def test_the_name_of_a_joined_weight_with_a_wrong_number_is_told(file):
    rows = ROWS["b"].clone()
    rows[1, :2] = 255
    found = concatenate([read_blocks(ROWS["a"], KIND, "first"), read_blocks(rows, KIND, "second")])
    with pytest.raises(AiakqError, match=r"second\.weight"):
        linear.prepare(found, found.problem(torch.float32, "cpu"))
