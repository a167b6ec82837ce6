"""Loads the native library, declares the argument structs of its operations, and runs lists of operations.

``load_library()`` loads it on first use. The normal install builds it if there is a C++ compiler (build.py); without
it, the torch implementations run. The environment variable AIAKQ_CPU_LIBRARY selects another build of the library,
AIAKQ_CPU_ISA an instruction set; AIAKQ_KERNELS=reference disables the library.

The instruction sets avx2, avx512 and vnni give bit-identical results, because the order of every sum is fixed. Two
cases differ in the last bits: portable, which has no fused multiply-add, and bfloat16 products on vnni_bf16, which are
accumulated in pairs.

Operations are declared once, in src/ops.def. The library describes them, and the ctypes structures here are generated
from that description when it is loaded.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from ctypes import Structure, c_bool, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from aiakq.kernels.cpu import build
from aiakq.kernels.selection import VARIABLE, allowed

FILE = build.TARGET

#: LinearMath and DataType of src/ops.def, needed before the library is loaded.
EXACT, BLOCKS, ROWS, E4M3, E5M2, TABLE, TABLE_OF_5_BITS, TABLE_OF_8_BITS, TABLE_OF_16_BITS = range(9)
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3, torch.int8: 4}
_TABLES = ("TABLE", "TABLE_OF_5_BITS", "TABLE_OF_8_BITS", "TABLE_OF_16_BITS")
_MATH = ("EXACT", "BLOCKS", "ROWS", "E4M3", "E5M2", *_TABLES)
_CONSTANTS = {name: number for number, name in enumerate(_MATH)} | {
    str(dtype).removeprefix("torch.").upper(): number for dtype, number in TYPES.items()
}

_C_TYPES = {"int32": c_int32, "int64": c_int64, "float": c_float, "double": c_double, "pointer": c_void_p}
#: Exported function -> the types of its result and of its arguments.
_FUNCTIONS: Mapping[str, tuple[Any, ...]] = {
    "aiakq_isa": (c_char_p,),
    "aiakq_use_isa": (c_bool, c_char_p),
    "aiakq_ops": (c_char_p,),
    "aiakq_scratch": (c_int64, c_void_p),
    "aiakq_run": (None, c_void_p, c_int64, c_int32),
    "aiakq_pack_codes": (None, c_void_p, *2 * [c_int64], *2 * [c_int32], c_void_p, c_int64, c_void_p, c_int32),
    "aiakq_pack_words": (None, c_void_p, *4 * [c_int64], c_int32, c_void_p, c_int32),
    "aiakq_pack_blocks": (c_int32, *3 * [c_void_p], *2 * [c_int64], *2 * [c_int32], *5 * [c_void_p], c_int32),
    "aiakq_pack_floats": (None, c_void_p, *2 * [c_int64], c_int32, c_bool, c_void_p, c_int32),
}


class LibraryMismatchError(OSError):
    """Raised when the library was built from other sources than this package."""


class _Description(TypedDict):
    """A structure of ops.def: (name, type, offset) of its fields, and its size in bytes."""

    fields: list[tuple[str, str, int]]
    size: int


def structures(description: Mapping[str, _Description]) -> dict[str, type[Structure]]:
    """Create ctypes structures from the description returned by aiakq_ops in src/library.cpp.

    Raises LibraryMismatchError if ctypes places a field at another offset than the compiler.
    """
    types = {}
    for name, struct in description.items():
        fields = [(field, _C_TYPES[type_name]) for field, type_name, _ in struct["fields"]]
        structure = type(name, (Structure,), {"_fields_": fields})
        for field, _, offset in struct["fields"]:
            if getattr(structure, field).offset != offset:
                raise LibraryMismatchError(f"the field {field} of {name} is at byte {offset}")
        if ctypes.sizeof(structure) != struct["size"]:
            raise LibraryMismatchError(f"{name} has {struct['size']} bytes")
        types[name] = structure
    return types


class NativeLibrary:
    """The loaded library. Raises OSError if it cannot be loaded, LibraryMismatchError if it does not match.

    cdll       the library's functions.
    structs    name -> ctypes structure; operations have lower-case names.
    kinds      name of an operation -> its number.
    constants  enum values and constants of src/ops.def.
    """

    def __init__(self, path: Path) -> None:
        _share_openmp_runtime()
        self.cdll = cdll = ctypes.CDLL(str(path))
        if not hasattr(cdll, "aiakq_abi"):
            raise LibraryMismatchError(f"{path} does not say what it was built from")
        cdll.aiakq_abi.restype = c_char_p
        if cdll.aiakq_abi().decode() not in (build.abi(), ""):
            raise LibraryMismatchError(f"{path} was built from other sources")
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(cdll, name)
            function.restype, function.argtypes = result, arguments
        description = json.loads(cdll.aiakq_ops())
        self.constants: dict[str, int] = description["constants"]
        self.structs = structures(description["structs"])
        self.kinds: dict[str, int] = {
            name: struct["kind"] for name, struct in description["structs"].items() if struct["kind"] is not None
        }
        differing = [name for name, number in _CONSTANTS.items() if self.constants.get(name) != number]
        if differing:
            raise LibraryMismatchError(f"{path} was built from other sources: {', '.join(differing)} differ")
        isa = os.environ.get("AIAKQ_CPU_ISA")
        if isa:
            self.use_isa(isa)

    @property
    def isa(self) -> str:
        """The instruction set in use: vnni_bf16, vnni, avx512, avx2 or portable."""
        return str(self.cdll.aiakq_isa().decode())

    def use_isa(self, name: str) -> None:
        """Switch to another instruction set. Raises OSError if this machine does not support it."""
        if not self.cdll.aiakq_use_isa(name.encode()):
            raise OSError(f"this machine does not have the instruction set {name}")

    def scratch_bytes(self, op: Structure) -> int:
        """Return the bytes of scratch memory that ``op`` needs per row (attention: per thread)."""
        return int(self.cdll.aiakq_scratch(ctypes.byref(op)))


class _OfThread(threading.local):
    #: Receives operations instead of running them while a Recording of this thread is active (recording.py).
    recorder: Callable[[tuple[Structure, ...]], None] | None = None


of_thread = _OfThread()


class OpList:
    """Operations that run one after the other in a single call; their fields may change between calls.

    lock  must be held from the first change of a field until the call returns, because threads share the operations.
    """

    #: Memory that the operations point to and that nothing else keeps alive.
    memory: object = None

    def __init__(self, *ops: Structure) -> None:
        self.lock = threading.Lock()
        self.ops = ops
        self._pointers = (c_void_p * len(ops))(*(ctypes.addressof(op) for op in ops))
        self._address, self._count = ctypes.addressof(self._pointers), len(ops)
        self._run = load_library().cdll.aiakq_run

    def __call__(self, threads: int = 0) -> None:
        """Run the operations on ``threads`` threads; 0: torch's number of threads."""
        if of_thread.recorder is not None:
            return of_thread.recorder(self.ops)
        self._run(self._address, self._count, threads or torch.get_num_threads())


@lru_cache(maxsize=1)
def load_library() -> NativeLibrary:
    """Return the library, loaded once. Raises OSError if it is missing or does not match."""
    return NativeLibrary(Path(os.environ.get("AIAKQ_CPU_LIBRARY") or FILE))


def new_op(name: str) -> Structure:
    """Create an operation of src/ops.def with all fields except ``kind`` set to 0."""
    library = load_library()
    op = library.structs[name]()
    op.kind = library.kinds[name]
    return op


def unavailable() -> str | None:
    """Return None if the library can be used, else one sentence with the reason and the remedy."""
    if not allowed("cpu"):
        return f"{VARIABLE} does not name them"
    try:
        load_library()
    except LibraryMismatchError:
        return f"the native kernels were built from other sources: run '{build.COMMAND}'"
    except (OSError, AttributeError) as problem:
        if not FILE.exists():
            return f"the native kernels were not built: install g++ or clang++, then run '{build.COMMAND}'"
        return f"the native kernels could not be loaded: {problem}"
    return None


def openmp_runtimes() -> set[str]:
    """Return the paths of OpenMP runtimes loaded into this process; empty where there is no /proc."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    files = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return {file for file in files if re.match(r"lib[gi]?omp\d*\b", Path(file).name)}


def _share_openmp_runtime() -> None:
    """Make the library use torch's OpenMP runtime, so that both share one thread pool.

    The library is linked with libgomp.so.1, the name of torch's runtime in its x86 wheels. Where torch's runtime has
    another name, opening it with RTLD_GLOBAL makes its symbols take precedence.
    """
    for file in openmp_runtimes():
        ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)


def address(tensor: Tensor | None) -> int | None:
    """Return the address of the first element of a CPU tensor [...] of any dtype; None for None."""
    return None if tensor is None else tensor.data_ptr()


def allocate_scratch(count: int) -> Tensor:
    """Allocate [count] uint8, uninitialized and aligned to 64 bytes by torch's allocator."""
    return torch.empty(count, dtype=torch.uint8)


def matmul(x: Tensor, op: Structure, ops: OpList, scratch_per_row: int) -> Tensor:
    """Multiply x [M, K] -> [M, N] in the dtype of x with ``op`` (linear or dense), which ``ops`` runs."""
    m = x.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(m, op.n, dtype=x.dtype)
    scratch = allocate_scratch(m * scratch_per_row)
    with ops.lock:
        op.m, op.x_type, op.y_type = m, TYPES[x.dtype], TYPES[x.dtype]
        op.x, op.y, op.scratch = x.data_ptr(), y.data_ptr(), scratch.data_ptr()
        op.x_stride, op.y_stride = x.stride(0), op.n
        ops()
    return y
