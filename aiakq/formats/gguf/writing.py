"""Writing of the container: keys with types, headers, and the bytes of tensors; see file.py for the layout."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
from torch import Tensor

from aiakq.formats.gguf.file import ALIGNMENT, MAGIC
from aiakq.formats.gguf.kinds import KINDS, NUMBERS

_VERSION = 3
_ARRAY, _STRING = 9, 8
#: numpy's name of a type -> its number in files, and struct's name.
_TYPES = {
    "uint8": (0, "B"),
    "int8": (1, "b"),
    "uint16": (2, "H"),
    "int16": (3, "h"),
    "uint32": (4, "I"),
    "int32": (5, "i"),
    "float32": (6, "f"),
    "bool": (7, "?"),
    "uint64": (10, "Q"),
    "int64": (11, "q"),
    "float64": (12, "d"),
}


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor to write.

    kind    ggml's name of its kind.
    shape   as torch orders dimensions; the last is a multiple of the values of a block.
    blocks  returns its bytes as uint8, in any shape; called once, when its turn comes.
    """

    kind: str
    shape: tuple[int, ...]
    blocks: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * KINDS[NUMBERS[self.kind]].row_bytes(self.shape[-1])


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Mapping[str, WrittenTensor]) -> int:
    """Write a new file, synced to disk, and return its size in bytes.

    metadata  key -> value. Integers are stored as uint32 and those of lists as int32, floats as float32; a scalar or
              an array of numpy has the type that it says.

    Raises OSError, and ValueError for a value or a tensor that does not fit.
    """
    header, alignment = _header(metadata, tensors), _alignment(metadata)
    with open(path, "xb") as stream:
        stream.write(header)
        _pad(stream, alignment)
        for name, tensor in tensors.items():
            blocks = tensor.blocks().contiguous()
            if blocks.nbytes != tensor.nbytes:
                raise ValueError(f"{name}: {blocks.nbytes} bytes, not {tensor.nbytes}")
            stream.write(blocks.view(-1).numpy().data)
            _pad(stream, alignment)
        stream.flush()
        os.fsync(stream.fileno())
        return stream.tell()


def file_size(metadata: Mapping[str, object], tensors: Mapping[str, WrittenTensor]) -> int:
    """Return the size in bytes of the file that ``write_gguf`` writes. Raises ValueError as it does."""
    alignment = _alignment(metadata)
    sizes = (len(_header(metadata, tensors)), *(tensor.nbytes for tensor in tensors.values()))
    return sum(-(-size // alignment) * alignment for size in sizes)


def _alignment(metadata: Mapping[str, object]) -> int:
    alignment = metadata.get("general.alignment", ALIGNMENT)
    assert isinstance(alignment, int)
    return alignment


def _header(metadata: Mapping[str, object], tensors: Mapping[str, WrittenTensor]) -> bytes:
    """Return what is before the tensors: all keys, and the kind, shape and place of each tensor."""
    alignment = _alignment(metadata)
    header = bytearray(MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        header += _string(key) + _value(value, key)
    offset = 0
    for name, tensor in tensors.items():
        kind = KINDS[NUMBERS[tensor.kind]]
        if tensor.shape[-1] % kind.values:
            raise ValueError(f"{name}: {tensor.shape[-1]} values in a row are no whole blocks of {kind.values}")
        header += _string(name) + struct.pack("<I", len(tensor.shape))
        header += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        header += struct.pack("<IQ", NUMBERS[tensor.kind], offset)
        offset += -(-tensor.nbytes // alignment) * alignment
    return bytes(header)


def _pad(stream: BinaryIO, alignment: int) -> None:
    stream.write(bytes(-stream.tell() % alignment))


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object, key: str) -> bytes:
    """Return the type and the bytes of a value."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, numpy.ndarray) or (isinstance(value, Sequence) and not isinstance(value, bytes)):
        return struct.pack("<I", _ARRAY) + _array(value, key)
    number, code = _TYPES[_type_name(value, "uint32", key)]
    return struct.pack(f"<I{code}", number, value)


def _array(values: Sequence[object] | numpy.ndarray[Any, Any], key: str) -> bytes:
    if len(values) and all(isinstance(value, str) for value in values):
        return struct.pack("<IQ", _STRING, len(values)) + b"".join(map(_string, map(str, values)))
    names = {str(values.dtype)} if isinstance(values, numpy.ndarray) else set()
    names = names or {_type_name(value, "int32", key) for value in values} or {"int32"}
    if len(names) > 1:
        raise ValueError(f"{key} holds values of several types")
    number, _ = _TYPES[names.pop()]
    kind = next(name for name, (each, _) in _TYPES.items() if each == number)
    return struct.pack("<IQ", number, len(values)) + numpy.asarray(values, kind).tobytes()


def _type_name(value: object, integer: str, key: str) -> str:
    if isinstance(value, numpy.generic):
        return str(value.dtype)
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return integer
    if isinstance(value, float):
        return "float32"
    raise ValueError(f"{key} is of the type {type(value).__name__}, which GGUF files do not have")
