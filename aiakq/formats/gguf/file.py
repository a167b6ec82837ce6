"""GGUFFile: the container, a header of typed keys and of tensors, then their bytes; perhaps in several files.

Layout of a file, all of it little-endian (version 3; version 2 differs in nothing that matters here):

    magic "GGUF", version u32, number of tensors u64, number of keys u64
    each key: its name, the type of its value u32, the value
    each tensor: its name, number of dimensions u32, dimensions u64 (the innermost first), kind u32, offset u64
    padding to ``general.alignment`` (32), then the tensors; offsets count from here

A model in several files has the same header in each, with the tensors of that file, and ``split.no`` and
``split.count``; only the first has all keys. Reading trusts nothing, and maps no memory (see safetensors_file.py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from aiakq.errors import AiakqError, error
from aiakq.formats.gguf.cursor import Cursor
from aiakq.formats.gguf.kinds import KINDS, REMOVED, Kind
from aiakq.formats.model_folder import file_identity, open_regular, real_path
from aiakq.formats.safetensors_file import TensorInfo, open_weights, read_tensor

MAGIC = b"GGUF"
ALIGNMENT = 32
_VERSIONS = (2, 3)
_MAX_TENSORS = 100_000
_MAX_KEYS = 65_536
_MAX_NAME = 256
_MAX_ALIGNMENT = 1 << 16
_MAX_DIMS = 4
#: Limit of the files of a model.
MAX_FILES = 1000
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


@dataclass(frozen=True)
class GGUFTensor:
    """The header of one tensor.

    shape   as torch orders dimensions: [N, K] for a linear layer, [E, N, K] for stacked experts.
    file    name of its file.
    offset  position of its first byte in the file.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def rows(self) -> int:
        """Number of rows of K values, in all dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.kind.row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class GGUFFile:
    """A GGUF file, or all files of a model that was split, with headers that were read and validated.

    path      the file; the first of several.
    metadata  key -> bool, int, float, str, or a list of them.
    tensors   name -> header, in the order of the files.
    """

    def __init__(self, path: Path, metadata: Mapping[str, object]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors: dict[str, GGUFTensor] = {}
        self._streams: dict[str, BinaryIO] = {}
        self._identities: dict[str, tuple[int, int, int, int] | None] = {}

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Read the headers of a file, and of all others of a model that was split.

        Raises ``model_malformed``, ``model_incomplete`` for a part that is missing, ``gguf_unsupported`` for another
        version, byte order or kind of tensor, ``path_outside_model`` and ``broken_link``.
        """
        given = Path(path)
        files = _files(given)
        folder = given.parent
        for file in files:
            if not os.path.lexists(folder / file):
                raise error("model_incomplete", path=str(given), missing=f"{file} is missing")
        found: GGUFFile | None = None
        for number, file in enumerate(files):
            identity = file_identity(folder / file)
            metadata, tensors = _read_header(folder, file)
            _check_split(metadata, file, number, len(files))
            if found is None:
                found = cls(folder / file, metadata)
            found._identities[file] = identity
            for name, tensor in tensors.items():
                if name in found.tensors:
                    reason = f"tensor {name} is in {found.tensors[name].file}, too"
                    raise error("model_malformed", file=file, reason=reason)
                found.tensors[name] = tensor
        assert found is not None
        total = metadata_number(found.metadata, "split.tensors.count")
        if total is not None and total != len(found.tensors):
            reason = f"its files hold {len(found.tensors)} tensors, and split.tensors.count is {total}"
            raise error("model_malformed", file=found.path.name, reason=reason)
        return found

    @property
    def files(self) -> list[str]:
        """Names of the files, all of them in the folder of ``path``."""
        return list(self._identities)

    def read(self, name: str, first: int = 0, end: int | None = None) -> Tensor:
        """Read the blocks of a tensor, or of its rows ``first`` to ``end`` - 1, as uint8 [rows, bytes of a row].

        Rows are counted over all dimensions but the last. Raises KeyError for an unknown name, ``model_malformed`` if
        the file has changed since its header was read.
        """
        tensor = self.tensors[name]
        end = tensor.rows if end is None else end
        assert 0 <= first <= end <= tensor.rows
        width = tensor.row_bytes
        return self.read_at(tensor.file, tensor.offset + first * width, end - first, width)

    def read_at(self, file: str, offset: int, rows: int, width: int) -> Tensor:
        """Read bytes of a file, as uint8 [rows, width]. Raises ``model_malformed``, see ``read``."""
        descriptor = self.descriptor(file)
        value = read_tensor(self._streams[file], TensorInfo("U8", (rows, width), file, offset))
        self._check_unchanged(file, descriptor)
        return value

    def descriptor(self, file: str) -> int:
        """Return the descriptor of a file, which is open until ``close``.

        Raises ``model_malformed`` if it has changed since its header was read.
        """
        stream = self._streams.get(file) or self._open(file)
        self._check_unchanged(file, stream.fileno())
        return stream.fileno()

    def changed_files(self) -> list[str]:
        """Return the files that were written, replaced or removed since their headers were read."""
        return [file for file, known in self._identities.items() if file_identity(self.path.parent / file) != known]

    def close(self) -> None:
        """Close the files; tensors that were read remain valid."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _open(self, file: str) -> BinaryIO:
        def bad(reason: str) -> AiakqError:
            return error("model_malformed", file=file, reason=reason)

        stream = self._streams[file] = open_regular(real_path(self.path.parent, file), bad)
        self._check_unchanged(file, stream.fileno())
        return stream

    def _check_unchanged(self, file: str, current: int) -> None:
        if file_identity(current) != self._identities[file]:
            raise error("model_malformed", file=file, reason="it was changed while it was read")


def metadata_number(metadata: Mapping[str, object], key: str) -> int | None:
    """Return a value that is an integer, or None."""
    value = metadata.get(key)
    return value if type(value) is int else None


def _files(path: Path) -> list[str]:
    """Return the names of all files of the model that ``path`` belongs to."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path.name]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_FILES:
        raise error("model_malformed", file=path.name, reason="its name says that it is a part that cannot exist")
    return [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def _check_split(metadata: Mapping[str, object], file: str, number: int, count: int) -> None:
    """Raise ``model_malformed`` for a file that is another part than its name says."""
    said, index = metadata.get("split.count", 1), metadata.get("split.no", 0)
    if said in (0, 1) and count == 1:
        return
    if said != count:
        reason = f"split.count is {said!r:.40}, and its name says that there are {count} files"
        raise error("model_malformed", file=file, reason=reason)
    if index != number:
        raise error("model_malformed", file=file, reason=f"split.no is {index!r:.40}, and its name says {number}")


def _read_header(folder: Path, file: str) -> tuple[dict[str, object], dict[str, GGUFTensor]]:
    """Return the keys and the tensors of one file."""

    def bad(reason: str) -> AiakqError:
        return error("model_malformed", file=file, reason=reason)

    with open_weights(real_path(folder, file), bad) as stream:
        cursor = Cursor(stream, os.fstat(stream.fileno()).st_size, file)
        if cursor.size < len(MAGIC) or cursor.raw(len(MAGIC), "its magic") != MAGIC:
            raise bad("it does not start with the letters GGUF")
        _check_version(cursor.number("I", "its version"), file)
        num_tensors, num_keys = cursor.number("Q", "its number of tensors"), cursor.number("Q", "its number of keys")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise bad(f"it claims {num_tensors} tensors and {num_keys} keys")
        metadata = _read_keys(cursor, num_keys)
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise bad(f"general.alignment is {alignment!r:.40}, not a power of two from 8 to {_MAX_ALIGNMENT}")
        return metadata, _read_tensors(cursor, num_tensors, alignment, file)


def _unsupported(reason: str) -> AiakqError:
    return error("gguf_unsupported", reason=reason)


def _check_version(version: int, file: str) -> None:
    if version & 0xFFFF == 0:
        raise _unsupported(f"{file} is a GGUF file for big-endian machines")
    if version not in _VERSIONS:
        raise _unsupported(f"{file} is a GGUF file of version {version}, and versions 2 and 3 are read")


def _name(cursor: Cursor, what: str, limit: int) -> str:
    name = cursor.string(what)
    if not name or len(name) > limit or not name.isprintable():
        raise cursor.bad(f"{what} is {name!r:.80}")
    return name


def _read_keys(cursor: Cursor, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(count):
        key = _name(cursor, f"the name of key {index}", _MAX_KEYS)
        if key in metadata:
            raise cursor.bad(f"it has the key {key:.80} twice")
        what = f"key {key:.80}"
        metadata[key] = cursor.value(cursor.number("I", what), what)
    return metadata


def _read_tensors(cursor: Cursor, count: int, alignment: int, file: str) -> dict[str, GGUFTensor]:
    """Return the tensors of a file, whose bytes must be inside of it and follow each other, as llama.cpp wants it.

    The sizes of a header are checked by nothing else: a tensor of another kind than the one that was written, which
    takes fewer bytes, would leave a hole.
    """
    headers: list[GGUFTensor] = []
    for index in range(count):
        name = _name(cursor, f"the name of tensor {index}", _MAX_NAME)
        if ".." in name or "/" in name:
            raise cursor.bad(f"the name of tensor {index} is {name!r:.80}")
        headers.append(_read_tensor_header(cursor, name, alignment, file))
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    end, last = start, ""
    for header in sorted(headers, key=lambda each: each.offset):
        placed = GGUFTensor(header.name, header.kind, header.shape, file, start + header.offset)
        if placed.name in tensors:
            raise cursor.bad(f"it has the tensor {placed.name} twice")
        if placed.offset < end:
            raise cursor.bad(f"tensors {last} and {placed.name} overlap")
        gap, before = placed.offset - end, last
        end, last = placed.offset + placed.nbytes, placed.name
        tensors[placed.name] = placed
        if end > cursor.size:
            raise cursor.bad(f"it is cut off: tensor {placed.name} ends at byte {end} of {cursor.size}")
        if gap >= alignment:
            where = f"after tensor {before}" if before else "before the first tensor"
            raise cursor.bad(f"{gap // alignment * alignment} bytes {where} belong to no tensor")
    return tensors


def _read_tensor_header(cursor: Cursor, name: str, alignment: int, file: str) -> GGUFTensor:
    """Return the next header, with an offset that counts from the first tensor."""
    what = f"tensor {name}"
    dims = cursor.number("I", what)
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.bad(f"{what} has {dims} dimensions")
    shape = tuple(reversed([cursor.number("Q", what) for _ in range(dims)]))
    number, offset = cursor.number("I", what), cursor.number("Q", what)
    kind = KINDS.get(number)
    if kind is None:
        removed = number in REMOVED
        reason = "which llama.cpp no longer reads" if removed else "which is newer than this version of aiakq"
        raise _unsupported(f"{what} of {file} is of the kind {REMOVED.get(number, number)}, {reason}")
    if not all(0 < size < 2**48 for size in shape) or shape[-1] % kind.values:
        raise cursor.bad(f"{what} has the shape {list(shape)}, and {kind.name} has blocks of {kind.values}")
    if offset % alignment:
        raise cursor.bad(f"{what} starts at byte {offset}, which is not aligned to {alignment}")
    return GGUFTensor(name, kind, shape, file, offset)
