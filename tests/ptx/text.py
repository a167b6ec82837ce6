"""Reads the text of PTX: statements with their operands, registers by scope, and the lines of source they come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SIZES = {"pred": 0, "f16x2": 4, "bf16x2": 4, "bf16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)
}
#: Registers that every thread has, and their number for the core.
SPECIAL = {"%tid.x": 0} | {
    f"%{name}.{axis}": 1 + 3 * first + number
    for first, name in enumerate(("ctaid", "nctaid"))
    for number, axis in enumerate("xyz")
}

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)\s*((?:\.\w+[^\n{]*\s*)*)\{", re.S)
_PARAMETER = re.compile(r"\.param\s+\.(\w+)[^,)]*?(\w+)\s*(?:,|$)")
_SPACE = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)+", re.S)
_LOCATION = re.compile(r"\.loc[^\n]*?(?://\s*([\w.]+:\d+)[^\n]*)?\n")
_LABEL = re.compile(r"(\$?[\w$]+):(?!:)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]*);")
_STATEMENT = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*([^;]*);", re.S)
_ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]$")


class UnknownPtx(Exception):
    """Raised for PTX that the emulator does not know; the message names it."""


@dataclass(frozen=True)
class Register:
    """A register: its number among all of the program and its bytes, 0 for a predicate."""

    number: int
    size: int


@dataclass(frozen=True)
class Constant:
    """A constant, as the bits of 64 bits."""

    bits: int


@dataclass(frozen=True)
class Address:
    """Where memory is used: at a register or constant, and bytes from there."""

    base: Register | Constant
    displacement: int


@dataclass(frozen=True)
class Label:
    """The target of a branch."""

    name: str


@dataclass(frozen=True)
class Vector:
    """Several registers or constants in braces."""

    parts: tuple[Register | Constant, ...]


Value = Register | Constant | Address | Label | Vector


@dataclass(frozen=True)
class Statement:
    """An instruction.

    guard     the predicate that it depends on, or None; negated: on that not being set.
    text      as written.
    location  file and line of the source, or nothing.
    """

    name: str
    operands: tuple[Value, ...]
    guard: Register | None
    negated: bool
    text: str
    location: str


@dataclass
class Kernel:
    """A parsed kernel.

    parameters  their offsets in bytes by name, and at "" their size.
    registers   the sizes of all registers.
    special     the numbers of the special registers that occur, by name.
    labels      the numbers of the statements that follow them.
    """

    name: str
    threads: int
    parameters: dict[str, int]
    parameter_sizes: list[int] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: list[int] = field(default_factory=list)
    special: dict[str, Register] = field(default_factory=dict)


def parse(text: str) -> Kernel:
    """Parse the only kernel of ``text``. Raises UnknownPtx."""
    entries = list(_ENTRY.finditer(text))
    if len(entries) != 1:
        raise UnknownPtx(f"a file with {len(entries)} kernels")
    entry = entries[0]
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?!\s*,)", entry[3])
    if threads is None:
        raise UnknownPtx("a kernel without a number of threads in one dimension")
    kernel = Kernel(entry[1], int(threads[1]), {})
    at = 0
    for kind, name in _PARAMETER.findall(entry[2]):
        if kind not in SIZES:
            raise UnknownPtx(f"a parameter of type {kind}")
        at += -at % SIZES[kind]
        kernel.parameters[name] = at
        kernel.parameter_sizes.append(SIZES[kind])
        at += SIZES[kind]
    _Body(text, entry.end(), kernel).read()
    return kernel


class _Body:
    """Reads statements up to the brace that ends the kernel."""

    def __init__(self, text: str, position: int, kernel: Kernel) -> None:
        self._text, self._position, self._kernel = text, position, kernel
        self._scopes: list[dict[str, int]] = [{}]  # names, or with < at the end beginnings of names, to sizes
        self._known: list[dict[str, Register]] = [{}]
        self._location = ""

    def read(self) -> None:
        text = self._text
        while self._scopes:
            if space := _SPACE.match(text, self._position):
                self._position = space.end()
            start = text[self._position]
            if start == "{":
                self._scopes.append({})
                self._known.append({})
                self._position += 1
            elif start == "}":
                self._scopes.pop()
                self._known.pop()
                self._position += 1
            elif start == ".":
                self._directive()
            elif label := _LABEL.match(text, self._position):
                self._kernel.labels[label[1]] = len(self._kernel.statements)
                self._position = label.end()
            else:
                self._statement()

    def _directive(self) -> None:
        text, position = self._text, self._position
        if location := _LOCATION.match(text, position):
            self._location = location[1] or ""
            self._position = location.end()
        elif registers := _REGISTERS.match(text, position):
            if registers[1] not in SIZES:
                raise UnknownPtx(f"registers of type {registers[1]}")
            for name in registers[2].split(","):
                name = name.strip()
                self._scopes[-1][name.partition("<")[0] + "<" * ("<" in name)] = SIZES[registers[1]]
            self._position = registers.end()
        elif text.startswith(".pragma", position):
            self._position = text.index(";", position) + 1
        else:
            raise UnknownPtx(f"directive {text[position : position + 40].split()[0]}")

    def _statement(self) -> None:
        match = _STATEMENT.match(self._text, self._position)
        if match is None:
            raise UnknownPtx(f"statement {self._text[self._position : self._position + 60]!r}")
        self._position = match.end()
        words = re.sub(r"/\*.*?\*/|//[^\n]*", "", match[4])
        guard = self._register(match[2]) if match[2] else None
        operands = tuple(self._operand(word) for word in _split(words))
        shown = " ".join(match[0].split())
        self._kernel.statements.append(Statement(match[3], operands, guard, match[1] == "!", shown, self._location))

    def _operand(self, word: str) -> Value:
        if word.startswith("{"):
            return Vector(tuple(self._scalar(part) for part in _split(word[1:-1])))
        if match := _ADDRESS.match(word):
            return Address(self._scalar(match[1]), int(match[2], 0) if match[2] else 0)
        if word.startswith("$"):
            return Label(word)
        return self._scalar(word)

    def _scalar(self, word: str) -> Register | Constant:
        if match := re.fullmatch(r"0f([0-9a-fA-F]{8})", word):
            return Constant(int(match[1], 16))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", word):
            return Constant(int(word.rstrip("U"), 0) & (1 << 64) - 1)
        if word == "1.0":  # a fraction of createpolicy
            return Constant(1)
        if word == "global_smem":
            return Constant(0)
        if word in self._kernel.parameters:
            return Constant(self._kernel.parameters[word])
        return self._register(word)

    def _register(self, word: str) -> Register:
        for names, known in zip(reversed(self._scopes), reversed(self._known), strict=True):
            if word in known:
                return known[word]
            size = names.get(word, names.get(word.rstrip("0123456789") + "<"))
            if size is not None:
                known[word] = self._new(size)
                return known[word]
        if word in SPECIAL:
            if word not in self._kernel.special:
                self._kernel.special[word] = self._new(4)
            return self._kernel.special[word]
        if word == "_":
            return Register(-1, -1)  # a result that nobody wants
        raise UnknownPtx(f"operand {word}")

    def _new(self, size: int) -> Register:
        self._kernel.registers.append(size)
        return Register(len(self._kernel.registers) - 1, size)


def _split(words: str) -> Iterator[str]:
    """Split at commas that are in no braces, and results of ``d|p`` too."""
    depth, start = 0, 0
    for at, letter in enumerate(words):
        depth += (letter in "{[") - (letter in "}]")
        if letter in ",|" and not depth:
            yield words[start:at].strip()
            start = at + 1
    if words[start:].strip():
        yield words[start:].strip()
