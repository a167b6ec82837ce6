"""The container: typed keys, tensors, files in parts; and whatever a hostile file claims, refused in one line."""

from __future__ import annotations

import struct
import tracemalloc

import numpy
import pytest
import torch

from aiakq.errors import AiakqError
from aiakq.formats.gguf.file import GGUFFile
from aiakq.formats.gguf.writing import WrittenTensor, write_gguf

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.eps": 0.5,
    "some.flag": True,
    "some.short": numpy.uint16(3),
    "some.long": numpy.int64(-(2**40)),
    "tokens": ["a", "ö", ""],
    "types": [1, -3, 2],
    "scores": [0.5, -1.0],
    "flags": [True, False],
    "bytes": numpy.arange(4, dtype=numpy.uint8),
}


def tensor(values: torch.Tensor, kind: str = "F32") -> WrittenTensor:
    return WrittenTensor(kind, tuple(values.shape), lambda: values.view(torch.uint8))


TENSORS = {"token_embd.weight": torch.randn(5, 3), "output_norm.weight": torch.randn(3), "x": torch.randn(2, 4, 3)}


def write(path, metadata=METADATA, tensors=TENSORS):
    write_gguf(path, metadata, {name: tensor(values) for name, values in tensors.items()})
    return path


def test_keys_and_tensors_are_those_that_were_written(tmp_path):
    file = GGUFFile.open(write(tmp_path / "model.gguf"))
    assert file.metadata == {**METADATA, "bytes": [0, 1, 2, 3]}
    assert {name: each.shape for name, each in file.tensors.items()} == {
        name: tuple(values.shape) for name, values in TENSORS.items()
    }
    for name, values in TENSORS.items():
        read = file.read(name)
        assert read.shape == (file.tensors[name].rows, file.tensors[name].row_bytes)
        assert torch.equal(read.view(torch.float32).view(values.shape), values)
    assert torch.equal(file.read("x", 4, 6).view(torch.float32), TENSORS["x"][1, :2])


def test_the_gguf_package_reads_the_same(tmp_path):
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(write(tmp_path / "model.gguf"))
    assert reader.fields["tokens"].contents() == METADATA["tokens"]
    assert reader.fields["some.short"].types == [gguf.GGUFValueType.UINT16]
    assert reader.fields["types"].contents() == METADATA["types"]
    for each in reader.tensors:
        assert torch.equal(torch.from_numpy(each.data.copy()), TENSORS[each.name])


def parts(folder, count=2, said=None):
    names = [folder / f"m-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    for index, path in enumerate(names):
        split = {"split.no": numpy.uint16(index), "split.count": numpy.uint16(said or count)}
        total = {"split.tensors.count": numpy.int32(count)}
        write(
            path, {**(METADATA if index == 0 else {}), **split, **total}, {f"t{index}": torch.full((4,), float(index))}
        )
    return names


def test_parts_are_one_model(tmp_path):
    names = parts(tmp_path)
    file = GGUFFile.open(names[1])
    assert file.path == names[0]
    assert file.metadata["llama.block_count"] == 2
    assert file.read("t1").view(torch.float32).tolist() == [[1.0] * 4]
    assert file.files == [path.name for path in names]


def test_a_missing_part_is_named(tmp_path):
    names = parts(tmp_path)
    names[1].unlink()
    with pytest.raises(AiakqError, match=r"m-00002-of-00002.gguf is missing"):
        GGUFFile.open(names[0])


def test_parts_that_contradict_their_names_are_refused(tmp_path):
    names = parts(tmp_path, said=3)
    with pytest.raises(AiakqError, match="split.count is 3"):
        GGUFFile.open(names[0])
    (tmp_path / "swapped").mkdir()
    first, second = parts(tmp_path / "swapped")
    first.rename(tmp_path / "first")
    second.rename(first)
    (tmp_path / "first").rename(second)
    with pytest.raises(AiakqError, match=r"split.no is 1"):
        GGUFFile.open(first)


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    names = parts(tmp_path)
    split = {"split.no": numpy.uint16(1), "split.count": numpy.uint16(2)}
    names[1].unlink()
    write(names[1], split, {"t0": torch.ones(4)})
    with pytest.raises(AiakqError, match="tensor t0 is in m-00001-of-00002.gguf, too"):
        GGUFFile.open(names[0])


def test_a_file_that_changed_is_not_read(tmp_path):
    path = write(tmp_path / "model.gguf")
    file = GGUFFile.open(path)
    path.unlink()
    write(path, tensors={**TENSORS, "y": torch.ones(2)})
    assert file.changed_files() == ["model.gguf"]
    with pytest.raises(AiakqError, match="changed while it was read"):
        file.read("x")


# --- hostile files ----------------------------------------------------------------------------------------------------


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(keys=b"", num_keys=0, tensors=b"", num_tensors=0, version=3, magic=b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_keys) + keys + tensors


def key(kind: int, value: bytes, name: bytes = b"k") -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def entry(name=b"t", shape=(8,), kind=0, offset=0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


HUGE = 2**63
NESTED = b"".join(struct.pack("<IQ", 9, 1) for _ in range(40))
DATA = bytes(256)
HOSTILE = {
    "empty": (b"", "letters GGUF"),
    "magic": (header(magic=b"GGML"), "letters GGUF"),
    "cut": (header()[:14], "cut off inside its header"),
    "version 1": (header(version=1), "version 1"),
    "version 4": (header(version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensors": (header(num_tensors=HUGE), "claims 9223372036854775808 tensors"),
    "keys": (header(num_keys=HUGE), "9223372036854775808 keys"),
    "many keys": (header(num_keys=60_000), "cut off inside its header"),
    "string": (header(key(8, struct.pack("<Q", HUGE)), 1), "claims 9223372036854775808 bytes"),
    "key": (header(struct.pack("<Q", 2**40), 1), "claims 1099511627776 bytes"),
    "array": (header(key(9, struct.pack("<IQ", 4, HUGE)), 1), "key k claims 9223372036854775808 entries"),
    "strings": (header(key(9, struct.pack("<IQ", 8, 2**22)), 1), "key k claims 4194304 entries"),
    "numbers": (header(key(9, struct.pack("<IQ", 12, 2**22)), 1), "key k claims 33554432 bytes"),
    "arrays": (header(key(9, struct.pack("<IQ", 9, 2**22)), 1), "key k claims 4194304 entries"),
    "nested": (header(key(9, NESTED), 1), "nests arrays"),
    "type": (header(key(13, bytes(8)), 1), "unknown type 13"),
    "bool": (header(key(7, b"\x02"), 1), "neither true nor false"),
    "bools": (header(key(9, struct.pack("<IQ", 7, 2) + b"\x01\x07"), 1), "neither true nor false"),
    "utf-8": (header(key(8, text(b"\xff")), 1), "key k is not UTF-8"),
    "strings not utf-8": (header(key(9, struct.pack("<IQ", 8, 1) + text(b"\xff")), 1), "key k is not UTF-8"),
    "twice": (header(key(0, b"\1") * 2, 2), "the key k twice"),
    "name": (header(key(0, b"\1", b"a\nb"), 1), r"name of key 0 is 'a\\nb'"),
    "no name": (header(key(0, b"\1", b""), 1), "name of key 0 is ''"),
    "alignment 0": (header(key(4, struct.pack("<I", 0), b"general.alignment"), 1), "general.alignment is 0"),
    "alignment 12": (header(key(4, struct.pack("<I", 12), b"general.alignment"), 1), "general.alignment is 12"),
    "alignment text": (header(key(8, text(b"32"), b"general.alignment"), 1), "general.alignment is '32'"),
    "alignment huge": (header(key(4, struct.pack("<I", 2**31), b"general.alignment"), 1), "alignment is 2147483648"),
    "no dimensions": (header(tensors=entry(shape=()), num_tensors=1), "has 0 dimensions"),
    "dimensions": (header(tensors=entry(shape=(1,) * 5), num_tensors=1), "has 5 dimensions"),
    "size": (header(tensors=entry(shape=(HUGE, 4)), num_tensors=1) + DATA, r"has the shape \[4, 9223372036854775808\]"),
    "sizes": (header(tensors=entry(shape=(2**40,) * 4), num_tensors=1) + DATA, "it is cut off"),
    "size 0": (header(tensors=entry(shape=(8, 0)), num_tensors=1) + DATA, r"has the shape \[0, 8\]"),
    "blocks": (header(tensors=entry(shape=(33,), kind=2), num_tensors=1) + DATA, "Q4_0 has blocks of 32"),
    "kind": (header(tensors=entry(kind=99), num_tensors=1) + DATA, "of the kind 99"),
    "old kind": (header(tensors=entry(kind=31), num_tensors=1) + DATA, "of the kind Q4_0_4_4"),
    "offset": (header(tensors=entry(offset=4), num_tensors=1) + DATA, "not aligned to 32"),
    "far": (header(tensors=entry(offset=2**62), num_tensors=1) + DATA, "it is cut off"),
    "cut data": (header(tensors=entry(shape=(64,)), num_tensors=1) + bytes(64), "it is cut off: tensor t"),
    "overlap": (header(tensors=entry() + entry(b"u"), num_tensors=2) + DATA, "tensors t and u overlap"),
    "hole": (
        header(tensors=entry() + entry(b"u", offset=64), num_tensors=2) + DATA,
        "32 bytes after tensor t belong to no tensor",
    ),
    "hole at the beginning": (
        header(tensors=entry(offset=32), num_tensors=1) + DATA,
        "32 bytes before the first tensor belong to no tensor",
    ),
    "same name": (header(tensors=entry() + entry(offset=32), num_tensors=2) + DATA, "tensor t twice"),
    "path": (header(tensors=entry(b"../t"), num_tensors=1) + DATA, "name of tensor 0"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_lies_are_refused_in_one_line_without_memory(case, tmp_path):
    content, message = HOSTILE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(AiakqError, match=message) as raised:
            GGUFFile.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert raised.value.id in ("model_malformed", "gguf_unsupported")
    assert "bad.gguf" in str(raised.value)


def test_links_must_stay_in_the_folder(tmp_path):
    (tmp_path / "inside").mkdir()
    write(tmp_path / "outside.gguf")
    (tmp_path / "inside" / "m.gguf").symlink_to(tmp_path / "outside.gguf")
    with pytest.raises(AiakqError, match="m.gguf"):
        GGUFFile.open(tmp_path / "inside" / "m.gguf")
