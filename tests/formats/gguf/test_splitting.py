"""Files of a limited size: read as one model, with the names and keys of llama-gguf-split."""

from __future__ import annotations

import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.formats.gguf import splitting
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf.splitting import files_of, write_parts
from aiakq.formats.gguf.writing import WrittenTensor

VALUES = {name: torch.randn(size, 8) for name, size in (("a", 2), ("b", 3), ("c", 1), ("d", 9), ("e", 1))}
KEYS = {"general.architecture": "llama", "llama.block_count": 2}


def tensors() -> dict[str, WrittenTensor]:
    return {
        name: WrittenTensor("F32", tuple(value.shape), lambda value=value: value.view(torch.uint8))
        for name, value in VALUES.items()
    }


def test_the_parts_hold_all_tensors_in_order(tmp_path):
    written = write_parts(tmp_path, "m.gguf", KEYS, tensors(), 5 * 32)
    assert [path.name for path in written] == [f"m-{number:05d}-of-00004.gguf" for number in (1, 2, 3, 4)]
    file = GGUFFile.open(written[0])
    assert [file.tensors[name].file[2:7] for name in VALUES] == ["00001", "00001", "00002", "00003", "00004"]
    for name, value in VALUES.items():
        assert torch.equal(file.read(name).view(torch.float32), value)
    assert file.metadata == {**KEYS, "split.no": 0, "split.count": 4, "split.tensors.count": 5}


def test_only_the_first_part_has_the_keys_and_they_have_llama_cpps_types(tmp_path):
    gguf = pytest.importorskip("gguf")
    written = write_parts(tmp_path, "m.gguf", KEYS, tensors(), 5 * 32)
    for number, path in enumerate(written):
        fields = gguf.GGUFReader(path).fields
        assert ("general.architecture" in fields) == (number == 0)
        types = [fields[f"split.{key}"].types for key in ("no", "count", "tensors.count")]
        wanted = gguf.GGUFValueType
        assert types == [[wanted.UINT16], [wanted.UINT16], [wanted.INT32]]


@pytest.mark.parametrize("limit", [None, 16 * 32])
def test_what_fits_into_one_file_has_its_own_name(tmp_path, limit):
    assert write_parts(tmp_path, "m.gguf", KEYS, tensors(), limit) == [tmp_path / "m.gguf"]
    assert GGUFFile.open(tmp_path / "m.gguf").metadata == KEYS


def test_more_files_than_are_read_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(splitting, "MAX_FILES", 3)
    with pytest.raises(AiakqError, match="--max-shard-size"):
        write_parts(tmp_path, "m.gguf", KEYS, tensors(), 32)


def test_files_of_a_name_are_found(tmp_path):
    names = ["m.gguf", "m-00001-of-00002.gguf", "m-00003-of-00003.gguf", "m-x.gguf", "n.gguf", "mm-00001-of-00002.gguf"]
    for name in names:
        (tmp_path / name).touch()
    assert {path.name for path in files_of(tmp_path / "m.gguf")} == set(names[:3])
