"""Cursor: typed values in the order in which the header of a GGUF file stores them, all of them little-endian.

Lengths are checked against the size of the file before anything is read or allocated, and the file is read in steps.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

import numpy

from aiakq.errors import AiakqError, error

#: Limit of a header: vocabularies of 262 000 tokens need 20 MiB.
MAX_HEADER_BYTES = 256 << 20
#: Limit of the entries of all arrays in a header.
MAX_ENTRIES = 8 << 20
#: Limit of the depth of arrays within arrays.
_MAX_DEPTH = 3
_STEP = 1 << 20
_STRING, _ARRAY, _BOOL = 8, 9, 7
#: Number of a type of values -> how struct and numpy call it.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


class Cursor:
    """Reads the header of one file from its beginning.

    position  of the next value, in bytes.
    size      of the file.
    """

    def __init__(self, stream: BinaryIO, size: int, file: str) -> None:
        self.position = 0
        self.size = size
        self._stream = stream
        self._file = file
        self._bytes = bytearray()
        self._entries = 0

    def bad(self, reason: str) -> AiakqError:
        """Return ``model_malformed`` for the file."""
        return error("model_malformed", file=self._file, reason=reason)

    def take(self, count: int, what: str) -> int:
        """Return the position of the next ``count`` bytes, which are in the buffer then, and step over them."""
        start = self.position
        self._fill(start + count, what)
        self.position = start + count
        return start

    def _fill(self, end: int, what: str) -> None:
        """Read on until the buffer has the first ``end`` bytes of the file."""
        if end > self.size:
            raise self.bad(f"it is cut off inside its header, or {what} claims {end - self.position} bytes")
        if end > MAX_HEADER_BYTES:
            raise self.bad(f"its header claims more than {MAX_HEADER_BYTES >> 20} MiB")
        while len(self._bytes) < end:
            part = self._stream.read(max(_STEP, end - len(self._bytes)))
            if not part:
                raise self.bad("it was cut off while it was read")
            self._bytes += part

    def raw(self, count: int, what: str) -> bytes:
        """Return the next ``count`` bytes."""
        start = self.take(count, what)
        return bytes(self._bytes[start : start + count])

    def number(self, code: str, what: str) -> int:
        """Return an integer of the type that struct calls ``code``."""
        layout = "<" + code
        value: int = struct.unpack_from(layout, self._bytes, self.take(struct.calcsize(layout), what))[0]
        return value

    def string(self, what: str) -> str:
        """Return a string: its length in 8 bytes, then UTF-8."""
        length = self.number("Q", what)
        try:
            return self.raw(length, what).decode()
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not UTF-8") from None

    def value(self, kind: int, what: str, depth: int = 0) -> object:
        """Return a value of the type with the number ``kind``; arrays as lists."""
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            if depth == _MAX_DEPTH:
                raise self.bad(f"{what} nests arrays more than {_MAX_DEPTH} deep")
            return self._array(what, depth)
        if kind not in _SCALARS:
            raise self.bad(f"{what} has a value of the unknown type {kind}")
        values = self._scalars(kind, 1, what)
        return values[0]

    def _array(self, what: str, depth: int) -> list[object]:
        kind, count = self.number("I", what), self.number("Q", what)
        self._entries += count
        if self._entries > MAX_ENTRIES:
            raise self.bad(f"{what} claims {count} entries")
        if kind in _SCALARS:
            return self._scalars(kind, count, what)
        if self.position + count * (8 if kind == _STRING else 12) > self.size:
            raise self.bad(f"{what} claims {count} entries")
        if kind == _STRING:
            return self._strings(count, what)
        return [self.value(kind, what, depth + 1) for _ in range(count)]

    def _strings(self, count: int, what: str) -> list[object]:
        """Return ``count`` strings, like ``string`` for each, at the speed that vocabularies need."""
        found: list[object] = []
        stored, position = self._bytes, self.position
        length_at = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                if position + 8 > len(stored):
                    self._fill(position + 8, what)
                end = position + 8 + length_at(stored, position)[0]
                if end > len(stored):
                    self._fill(end, what)
                found.append(stored[position + 8 : end].decode())
                position = end
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not UTF-8") from None
        self.position = position
        return found

    def _scalars(self, kind: int, count: int, what: str) -> list[object]:
        code = _SCALARS[kind]
        width = struct.calcsize("<" + code)
        start = self.take(count * width, what)
        dtype = numpy.dtype("u1" if kind == _BOOL else f"<{code}" if code in "fd" else _INTEGERS[code])
        values = numpy.frombuffer(bytes(self._bytes[start : self.position]), dtype)
        if kind == _BOOL:
            if count and values.max() > 1:
                raise self.bad(f"{what} is neither true nor false")
            values = values.astype(bool)
        found: list[object] = values.tolist()
        return found


#: struct's names of integers -> numpy's.
_INTEGERS = {"B": "<u1", "b": "<i1", "H": "<u2", "h": "<i2", "I": "<u4", "i": "<i4", "Q": "<u8", "q": "<i8"}
