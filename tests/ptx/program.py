"""A kernel that can be run: its PTX decoded for the C++ core, and the faults of a run in words."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from ptx import library
from ptx.text import SPECIAL, Address, Constant, Label, Register, Statement, UnknownPtx, Value, Vector, parse

LANES = 32
CONSTANT_BYTES = 640
#: What changes nothing where there are no caches.
IGNORED = {
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak", "v2", "v4", "v8",
    "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B",
}  # fmt: skip
#: How an access orders others, as bits for the core; see Order in global.h.
ORDERS = {"relaxed": 0, "volatile": 0, "acquire": 1, "release": 2, "acq_rel": 3, "cta": 4, "gpu": 0, "sys": 0}


class PtxFault(Exception):
    """Raised for what a kernel does wrong; the message is one line that names the instruction, block and warp.

    kind  such as "race" or "out of bounds".
    """

    def __init__(self, kernel: str, message: str, statement: Statement, block: Sequence[int], warp: int) -> None:
        self.kind = message.partition(":")[0]
        where = f" ({statement.location})" if statement.location else ""
        place = f"block {tuple(block)}, warp {warp}"
        super().__init__(f"{message}; in {kernel}{where}, {place}: {statement.text}")


class Span(NamedTuple):
    """The address of memory and its end."""

    begin: int
    end: int


@dataclass(frozen=True)
class RunOptions:
    """How a grid runs.

    seed         of the order of blocks and of warps between barriers; 0: in their order.
    truncate     whether sums of tensor cores are cut off toward zero, as GPUs do, and not rounded.
    approximate  whether results of .approx instructions and of div.full are off by as much as PTX allows them to be.
    limit        instructions of a warp, beyond which it is taken to be endless.
    """

    seed: int = 0
    truncate: bool = False
    approximate: bool = False
    limit: int = 10**9


class Program:
    """A kernel of PTX, ready to run.

    counts  how often each statement was executed by a warp, in all runs so far.
    """

    def __init__(self, text: str, shared: int) -> None:
        """Decode ``text``, whose kernel has ``shared`` bytes of shared memory. Raises UnknownPtx."""
        self.text, self.shared = text, shared
        self.kernel = parse(text)
        if self.kernel.threads % LANES:
            raise UnknownPtx(f"blocks of {self.kernel.threads} threads")
        self.counts = np.zeros(len(self.kernel.statements), np.uint64)
        self._core = library.library()
        self._handle = _Decoder(self).program(shared)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._core.ptx_free(self._handle)

    @property
    def steps(self) -> int:
        """The number of instructions that warps have executed so far."""
        return int(self.counts.sum())

    def run(
        self,
        grid: Sequence[int],
        parameters: Sequence[bytes],
        spans: Iterable[Span],
        options: RunOptions = RunOptions(),
    ) -> None:
        """Run a grid of blocks with the bits of its parameters, which may use the memory of ``spans``.

        Raises PtxFault.
        """
        block = bytearray()
        for size, bits in zip(self.kernel.parameter_sizes, parameters, strict=True):
            block += bytes(-len(block) % size)
            block += bits.ljust(size, b"\0")
            assert len(bits) <= size, "a parameter has room for its value"
        regions = [library.Region(*span) for span in spans]
        message, failed = ctypes.create_string_buffer(500), (ctypes.c_int32 * 5)()
        code = self._core.ptx_run(
            self._handle, (ctypes.c_uint32 * 3)(*grid), bytes(block), len(block),
            (library.Region * len(regions))(*regions), len(regions),
            library.Options(options.seed, options.limit, options.truncate, options.approximate),
            self.counts.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)), message, len(message), failed,
        )  # fmt: skip
        if code:
            statement = self.kernel.statements[failed[0]]
            raise PtxFault(self.kernel.name, message.value.decode(), statement, failed[1:4], failed[4])


class _Decoder:
    """Turns statements into what the core takes."""

    def __init__(self, program: Program) -> None:
        self._program, self._kernel = program, program.kernel
        self._constants: dict[int, int] = {}
        self._operands: list[library.Operand] = []
        self._offsets: list[int] = []
        at = 0
        self._sizes = [*self._kernel.registers, 0, 1, 2, 4, 8]  # and those whose values nobody wants
        for size in self._sizes:
            self._offsets.append(at)
            at += size * LANES + 32
        self._unwanted = dict(zip((0, 1, 2, 4, 8), self._offsets[-5:], strict=True))

    def program(self, shared: int) -> int:
        kernel = self._kernel
        lines = [self._line(statement) for statement in kernel.statements]
        special = [-1] * len(SPECIAL)
        for name, register in kernel.special.items():
            special[SPECIAL[name]] = self._offsets[register.number]
        constants = b"".join(_constant(bits) for bits in self._constants)
        failed = ctypes.c_int32()
        handle = self._program._core.ptx_program(
            (library.Line * len(lines))(*lines), len(lines), (library.Operand * len(self._operands))(*self._operands),
            len(self._operands), constants, len(constants), (ctypes.c_uint32 * len(self._sizes))(*self._sizes),
            len(self._sizes), (ctypes.c_int32 * len(SPECIAL))(*special), kernel.threads, shared, ctypes.byref(failed),
        )  # fmt: skip
        if not handle:
            raise UnknownPtx(f"instruction in {kernel.name}: {kernel.statements[failed.value].text}")
        return int(handle)

    def _line(self, statement: Statement) -> library.Line:
        name, values = _canonical(statement)
        first, target = len(self._operands), -1
        for value in values:
            if isinstance(value, Label):
                if value.name not in self._kernel.labels:
                    raise UnknownPtx(f"label {value.name}")
                target = self._kernel.labels[value.name]
            else:
                self._operands.append(self._operand(value, statement))
        guard = -1 if statement.guard is None else self._offsets[statement.guard.number]
        return library.Line(name.encode(), first, len(self._operands) - first, guard, statement.negated, target)

    def _operand(self, value: Value, statement: Statement) -> library.Operand:
        if isinstance(value, Address):
            base, displacement = value.base, value.displacement
            if isinstance(base, Constant):
                return self._operand(Constant(base.bits + displacement), statement)
            return library.Operand(displacement, self._offsets[base.number], base.size, 0)
        if isinstance(value, Constant):
            if value.bits not in self._constants:
                self._constants[value.bits] = len(self._constants) * CONSTANT_BYTES
            # As an address, a constant is one of shared memory.
            return library.Operand(0, self._constants[value.bits], 4, 1)
        assert isinstance(value, Register), value
        if value.number < 0:
            return library.Operand(0, self._unwanted[value.size], value.size, 0)
        return library.Operand(0, self._offsets[value.number], value.size, 0)


def _constant(bits: int) -> bytes:
    """Return a constant in all sizes, each for all lanes and followed by the mask of undefined ones; see emulator.h."""
    parts = [struct.pack("<Q", bits)[:size] * LANES + bytes(32) for size in (8, 4, 2, 1)]
    return b"".join(parts) + struct.pack("<II", 0xFFFFFFFF if bits else 0, 0) + bytes(24)


def _canonical(statement: Statement) -> tuple[str, list[Value]]:
    """Return the name that the core has for an instruction and its operands in the core's order."""
    parts = statement.name.split(".")
    values: list[Value] = list(statement.operands)
    base = parts[0]
    if base in ("ld", "st", "atom", "red"):
        hinted = "L2::cache_hint" in parts
        parts = ["shared" if part == "shared::cta" else part for part in parts if part not in IGNORED]
        ordered = [part for part in parts if part in ORDERS]
        parts = [part for part in parts if part not in ORDERS]
        if hinted:
            values.pop()
        if base == "st":
            values = [values[1], values[0]]
        elif base == "atom":
            values = [values[0], *values[2:], values[1]]
        elif base == "red":
            values = [*values[1:], values[0]]
        if base in ("atom", "red") or ordered:
            parts[1:1] = ["strong"] if base in ("ld", "st") else []
            values.append(Constant(sum(ORDERS[part] for part in ordered)))
    elif statement.name.startswith("cp.async.c") and "shared" in parts:
        if "L2::cache_hint" in parts:
            values.pop()
        parts = [part for part in parts if not part.startswith("L2::")]
    elif base == "stmatrix":
        values = [values[1], values[0]]
    elif base == "mov" and len(values) == 2 and any(isinstance(value, Vector) for value in values):
        parts.append("unpack" if isinstance(values[0], Vector) else "pack")
        values = [_with_sizes(value, int(parts[1][1:]) // 8) for value in values]
    elif base == "bra":
        parts = [part for part in parts if part != "uni"]
    flat: list[Value] = []
    for value in values:
        flat += value.parts if isinstance(value, Vector) else [value]
    return ".".join(parts), flat


def _with_sizes(value: Value, size: int) -> Value:
    """Return a vector whose unwanted parts have the size of a part."""
    if not isinstance(value, Vector):
        return value
    own = size // len(value.parts)
    return Vector(tuple(Register(-1, own) if part == Register(-1, -1) else part for part in value.parts))
