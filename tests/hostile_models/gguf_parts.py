"""A GGUF file in parts: its keys and the entries of its tensors, as bytes that can be exchanged and written again."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

#: Sizes of the types of values; 8 is text and 9 an array.
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9
#: Kinds of as many bytes, between which only their number decides: F16, BF16; Q4_0, Q4_K, IQ4_NL; IQ4_XS, MXFP4.
_ALIKE = ({1, 30}, {2, 12, 20}, {23, 39})
_LARGE = [0, 1, 3, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


@dataclass
class Entry:
    """A tensor: its name, sizes from the innermost one, kind and offset."""

    name: bytes
    sizes: list[int]
    kind: int
    offset: int

    def written(self) -> bytes:
        sizes = struct.pack(f"<{len(self.sizes)}Q", *(size % 2**64 for size in self.sizes))
        tail = struct.pack("<IQ", self.kind % 2**32, self.offset % 2**64)
        return _text(self.name) + struct.pack("<I", len(self.sizes)) + sizes + tail


@dataclass
class Parts:
    """keys  (name, type, bytes of the value); ``claimed``: the numbers of tensors and keys, if not the true ones."""

    keys: list[tuple[bytes, int, bytes]]
    tensors: list[Entry]
    data: bytes
    claimed: tuple[int | None, int | None] = (None, None)
    version: int = 3

    @classmethod
    def of(cls, content: bytes) -> Parts:
        """Return the parts of a file with an alignment of 32."""
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", content, 4)
        at, keys, tensors = 24, [], []
        for _ in range(num_keys):
            name, at = _read_text(content, at)
            (kind,) = struct.unpack_from("<I", content, at)
            end = _end_of_value(content, at + 4, kind)
            keys.append((name, kind, content[at + 4 : end]))
            at = end
        for _ in range(num_tensors):
            name, at = _read_text(content, at)
            (count,) = struct.unpack_from("<I", content, at)
            sizes = list(struct.unpack_from(f"<{count}Q", content, at + 4))
            kind, offset = struct.unpack_from("<IQ", content, at + 4 + 8 * count)
            tensors.append(Entry(name, sizes, kind, offset))
            at += 16 + 8 * count
        return cls(keys, tensors, content[at + -at % 32 :], version=version)

    def written(self) -> bytes:
        """Return the file."""
        counts = [
            len(found) if said is None else said
            for found, said in zip((self.tensors, self.keys), self.claimed, strict=True)
        ]
        head = b"GGUF" + struct.pack("<IQQ", self.version, *(count % 2**64 for count in counts))
        head += b"".join(_text(name) + struct.pack("<I", kind) + value for name, kind, value in self.keys)
        head += b"".join(entry.written() for entry in self.tensors)
        return head + bytes(-len(head) % 32) + self.data

    def mutate(self, rng: random.Random) -> tuple[str, str]:
        """Change one thing; return what, and its kind (mutations.py)."""
        how = rng.random()
        if how < 0.4:
            return self._mutate_key(rng)
        if how < 0.75:
            return self._mutate_tensor(rng)
        if how < 0.8:
            self.claimed = (rng.choice([None, *_LARGE]), rng.choice([None, *_LARGE]))
            return f"claims {self.claimed} tensors and keys", "structure"
        if how < 0.85:
            self.data = self.data[: rng.randrange(len(self.data))]
            return f"cut to {len(self.data)} bytes of data", "structure"
        entry, content = rng.choice(self.tensors), bytearray(self.data)
        for _ in range(rng.choice([1, 8, 64])):
            content[min(entry.offset + rng.randrange(64), len(content) - 1)] = rng.choice([0, 255, 127, 128, 0x7C])
        self.data = bytes(content)
        return f"bytes of {entry.name.decode()}", "data"

    def _mutate_key(self, rng: random.Random) -> tuple[str, str]:
        at = rng.randrange(len(self.keys))
        name, kind, value = self.keys[at]
        how = rng.randrange(6)
        said = f"key {name.decode()}"
        if how == 0:
            del self.keys[at]
            return f"{said} dropped", "config"
        if how == 1:
            self.keys.append(self.keys[at])
            return f"{said} twice", "structure"
        if how == 2:
            kind = rng.choice([0, 4, 5, 6, 7, 8, 9, 12, 13, 2**31])
            self.keys[at] = (name, kind, value)
            return f"{said} of type {kind}", "data"
        if kind in (_TEXT, _ARRAY) and how < 5:
            size = rng.choice(_LARGE)
            start = 0 if kind == _TEXT else 4
            self.keys[at] = (name, kind, value[:start] + struct.pack("<Q", size) + value[start + 8 :])
            return f"{said} claims {size} entries", "data"
        if kind in _WIDTHS:
            value = bytes(rng.choice([0, 1, 255, 127, 128]) for _ in value)
            self.keys[at] = (name, kind, value)
            return f"{said} = {value.hex()}", "config"
        content = bytearray(value)
        content[rng.randrange(len(content))] = rng.randrange(256)
        self.keys[at] = (name, kind, bytes(content))
        return f"{said} with another byte", "config"

    def _mutate_tensor(self, rng: random.Random) -> tuple[str, str]:
        entry = rng.choice(self.tensors)
        said, how = f"tensor {entry.name.decode()}", rng.randrange(7)
        if how == 0:
            entry.sizes[rng.randrange(len(entry.sizes))] = size = rng.choice([*_LARGE, 2, 32, 64])
            return f"{said} with a size of {size}", "structure"
        if how == 1:
            entry.sizes = rng.choice([entry.sizes[::-1], [], [*entry.sizes, 1], [1] * 5, [2**32, 2**32]])
            return f"{said} of {entry.sizes}", "structure"
        if how == 2:
            old, entry.kind = entry.kind, rng.choice([0, 1, 2, 8, 12, 14, 20, 30, 31, 39, 99, 2**31])
            is_alike = any({old, entry.kind} <= kinds for kinds in _ALIKE)
            return f"{said} of kind {entry.kind}, not {old}", "data" if is_alike else "structure"
        if how == 3:
            entry.offset = rng.choice([0, 1, 32, entry.offset + 32, *_LARGE])
            return f"{said} at {entry.offset}", "structure"
        if how == 4:
            self.tensors.remove(entry)
            return f"{said} dropped", "structure"
        if how == 5:
            other = rng.choice(self.tensors)
            entry.name = (
                other.name if rng.random() < 0.5 else rng.choice([b"", b"../x", b"x\n", b"blk.9.attn_q.weight"])
            )
            return f"{said} is called {entry.name.decode()!r}", "structure"
        self.tensors.append(Entry(b"extra.weight", entry.sizes, entry.kind, entry.offset))
        return f"{said} twice, also as extra.weight", "structure"


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _read_text(content: bytes, at: int) -> tuple[bytes, int]:
    (size,) = struct.unpack_from("<Q", content, at)
    if size > len(content):
        raise ValueError("text")
    return content[at + 8 : at + 8 + size], at + 8 + size


def _end_of_value(content: bytes, at: int, kind: int) -> int:
    if kind in _WIDTHS:
        return at + _WIDTHS[kind]
    if kind == _TEXT:
        return _read_text(content, at)[1]
    inner, count = struct.unpack_from("<IQ", content, at)
    at += 12
    if inner in _WIDTHS:
        return at + count * _WIDTHS[inner]
    for _ in range(count):
        at = _end_of_value(content, at, inner)
    return at
