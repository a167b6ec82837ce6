"""The native library: its operations as structs (src/ops.h), and running them.

``native()`` loads it on first use. It is built by the normal install where there is a C++ compiler (build.py); without
it, the torch implementations run. AIAKQ_CPU_LIBRARY names another build of it, AIAKQ_CPU_ISA an instruction set;
AIAKQ_KERNELS=reference does without it.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from ctypes import Structure, c_bool, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from aiakq.kernels import VARIABLE, allowed
from aiakq.kernels.cpu import build

FILE = build.TARGET

#: Kinds of operations, in the order of src/ops.h.
LINEAR, DENSE, EMBEDDING, NORM, ROTARY, ATTENTION, GATE, SAMPLE, FEEDBACK = range(9)
#: How a quantized product is computed; see src/ops.h.
EXACT, BLOCKS, ROWS = range(3)
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}

_LARGE_PAGE, _MADV_HUGEPAGE = 2**21, 14


class Op(Structure):
    """What every operation begins with."""

    _fields_ = (("kind", c_int32), ("m", c_int32))


class Linear(Structure):
    """A product with quantized weights."""

    _fields_ = (
        ("op", Op),
        *((name, c_int32) for name in ("n", "k", "bits", "math", "group", "groups", "scale_type", "zero_type")),
        *((name, c_int32) for name in ("x_type", "y_type")),
        *((name, c_void_p) for name in ("x", "y", "residual")),
        *((name, c_int64) for name in ("x_stride", "y_stride", "residual_stride")),
        *((name, c_void_p) for name in ("tiles", "scales", "zeros", "source", "bias", "input_scale", "scratch")),
    )


class Dense(Structure):
    """A product with weights in floats."""

    _fields_ = (
        ("op", Op),
        *((name, c_int32) for name in ("n", "k", "weight_type", "x_type", "y_type", "reserved")),
        *((name, c_void_p) for name in ("x", "y", "residual")),
        *((name, c_int64) for name in ("x_stride", "y_stride", "residual_stride")),
        *((name, c_void_p) for name in ("tiles", "bias", "scratch")),
    )


class Embedding(Structure):
    """Rows of a table."""

    _fields_ = (
        ("op", Op),
        *((name, c_int32) for name in ("d", "table_type", "y_type", "tiled")),
        *((name, c_int64) for name in ("vocabulary", "y_stride")),
        *((name, c_void_p) for name in ("table", "ids", "y")),
    )


class Norm(Structure):
    """A normalization of rows."""

    _fields_ = (
        ("op", Op),
        *((name, c_int32) for name in ("d", "x_type", "centered")),
        ("epsilon", c_float),
        *((name, c_void_p) for name in ("x", "y", "residual")),
        *((name, c_int64) for name in ("x_stride", "y_stride", "residual_stride")),
        *((name, c_void_p) for name in ("weight", "bias")),
    )


class Gate(Structure):
    """An activation function, times another tensor or alone."""

    _fields_ = (
        ("op", Op),
        *((name, c_int32) for name in ("columns", "type", "activation", "reserved")),
        *((name, c_void_p) for name in ("gate", "up", "y")),
        *((name, c_int64) for name in ("gate_stride", "up_stride", "y_stride")),
    )


class Choice(Structure):
    """What is asked of one row of logits, and the answer."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "raw")),
        *((name, c_double) for name in ("uniform", "top_p", "min_p")),
        ("temperature", c_float),
        *((name, c_int32) for name in ("top_k", "given", "count", "ranked", "token", "rank")),
        *((name, c_float) for name in ("normalizer", "log_probability")),
        ("reserved", c_int32),
        *((name, c_void_p) for name in ("top_ids", "top_values")),
    )


class Sample(Structure):
    """One token per row of logits."""

    _fields_ = (
        ("op", Op),
        *((name, c_int32) for name in ("vocabulary", "reserved")),
        *((name, c_void_p) for name in ("choices", "scratch")),
    )


class Feedback(Structure):
    """Columns of a weight, rounded while those behind them make up for it."""

    _fields_ = (
        ("op", Op),
        *((name, c_int32) for name in ("n", "length", "bits", "reserved")),
        *((name, c_int64) for name in ("stride", "grid_stride", "response_stride")),
        *((name, c_void_p) for name in ("block", "response", "drift", "before", "values", "steps")),
        *((name, c_void_p) for name in ("scales", "zeros", "codes", "groups", "places")),
    )


class Step(Structure):
    """Where the tokens of a step are in the paged cache; no operation by itself."""

    _fields_ = (
        *((name, c_int32) for name in ("sequences", "max_pages")),
        *((name, c_void_p) for name in ("query_start", "kv_len", "page_table", "slots", "positions")),
    )


class Rotary(Structure):
    """Head norms, rotary positions, and keys and values into the cache."""

    _fields_ = (
        ("op", Op),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_size", "rotated", "x_type", "cache_type")),
        ("eps", c_float),
        ("page_size", c_int32),
        *((name, c_void_p) for name in ("step", "q", "k", "v")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "cosines", "sines")),
        *((name, c_void_p) for name in ("k_cache", "v_cache", "k_scales", "v_scales")),
    )


class Attention(Structure):
    """Attention over the paged cache."""

    _fields_ = (
        ("op", Op),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_size", "page_size", "window")),
        *((name, c_int32) for name in ("q_type", "out_type", "cache_type")),
        ("scale", c_float),
        ("reserved", c_int32),
        *((name, c_void_p) for name in ("step", "q", "out")),
        *((name, c_int64) for name in ("q_stride", "out_stride")),
        *((name, c_void_p) for name in ("k_cache", "v_cache", "k_scales", "v_scales", "scratch")),
        ("scratch_bytes", c_int64),
    )


STRUCTS: dict[int, type[Structure]] = {
    LINEAR: Linear,
    DENSE: Dense,
    EMBEDDING: Embedding,
    NORM: Norm,
    ROTARY: Rotary,
    ATTENTION: Attention,
    GATE: Gate,
    SAMPLE: Sample,
    FEEDBACK: Feedback,
}


class Outdated(OSError):
    """The library was built from other sources than these."""


class Native:
    """The loaded library. Raises OSError if it cannot be loaded, Outdated if it does not fit."""

    def __init__(self, path: Path) -> None:
        _offer_openmp()
        library = ctypes.CDLL(str(path))
        if not hasattr(library, "aiakq_abi"):
            raise Outdated(f"{path} does not say what it was built from")
        library.aiakq_abi.restype = c_char_p
        if library.aiakq_abi().decode() not in (build.abi(), ""):
            raise Outdated(f"{path} was built from other sources")
        for name, result, *arguments in (
            ("aiakq_isa", c_char_p),
            ("aiakq_use_isa", c_bool, c_char_p),
            ("aiakq_size", c_int64, c_int32),
            ("aiakq_scratch", c_int64, c_void_p),
            ("aiakq_run", None, c_void_p, c_int64, c_int32),
            ("aiakq_pack_codes", None, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int64, c_void_p, c_int32),
            ("aiakq_pack_floats", None, c_void_p, c_int64, c_int64, c_int32, c_bool, c_void_p, c_int32),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.library = library
        for kind, struct in STRUCTS.items():
            size = library.aiakq_size(kind)
            if size != ctypes.sizeof(struct):
                raise Outdated(f"{path} was built from other sources: {struct.__name__} has {size} bytes in it")
        wanted = os.environ.get("AIAKQ_CPU_ISA")
        if wanted:
            self.use_isa(wanted)

    @property
    def isa(self) -> str:
        """The instruction set in use: vnni, avx512, avx2 or portable."""
        return self.library.aiakq_isa().decode()

    def use_isa(self, name: str) -> None:
        """Use another instruction set. Raises OSError if this machine does not have it."""
        if not self.library.aiakq_use_isa(name.encode()):
            raise OSError(f"this machine does not have the instruction set {name}")

    def scratch(self, op: Structure) -> int:
        """Bytes of scratch per row of ``op``."""
        return self.library.aiakq_scratch(ctypes.byref(op))


#: Told of operations instead of running them, while a Recording is active (recording.py).
recorder: Callable[[tuple[Structure, ...]], None] | None = None


class Call:
    """Some operations, to be run one after the other again and again; what they point to may change in between."""

    #: What the operations point to, if nobody else keeps it.
    kept: object = None

    def __init__(self, *ops: Structure) -> None:
        self.ops = ops
        self._pointers = (c_void_p * len(ops))(*(ctypes.addressof(op) for op in ops))
        self._at, self._count = ctypes.addressof(self._pointers), len(ops)
        self._run = native().library.aiakq_run

    def __call__(self, threads: int = 0) -> None:
        """Run them on so many threads, 0: torch's number."""
        if recorder is not None:
            return recorder(self.ops)
        self._run(self._at, self._count, threads or torch.get_num_threads())


@lru_cache(maxsize=1)
def native() -> Native:
    """The library. Raises OSError if it is not there or does not fit."""
    return Native(Path(os.environ.get("AIAKQ_CPU_LIBRARY") or FILE))


def unavailable() -> str | None:
    """None if the library can be used, else one sentence why not and what to do."""
    if not allowed("cpu"):
        return f"{VARIABLE} does not name them"
    try:
        native()
    except Outdated:
        return f"the native kernels were built from other sources: run '{build.COMMAND}'"
    except (OSError, AttributeError) as problem:
        if not FILE.exists():
            return f"the native kernels were not built: install g++ or clang++, then run '{build.COMMAND}'"
        return f"the native kernels could not be loaded: {problem}"
    return None


def openmp_runtimes() -> set[str]:
    """Files of the OpenMP runtimes that are loaded into this process; none are found where there is no /proc."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    files = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return {file for file in files if re.match(r"lib[gi]?omp\d*\b", Path(file).name)}


def _offer_openmp() -> None:
    """Let the library find torch's OpenMP runtime, so that both share one team of threads.

    It asks for libgomp.so.1, which is what torch's is called in its wheels for x86. Where it has another name, its
    functions are found first all the same once it is opened for everybody.
    """
    for file in openmp_runtimes():
        ctypes.CDLL(file, mode=ctypes.RTLD_GLOBAL)


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's data begin, or None for none."""
    return None if tensor is None else tensor.data_ptr()


def scratch_bytes(count: int) -> Tensor:
    """``count`` bytes of uninitialized memory whose first is at a multiple of 64: torch's allocator sees to that."""
    return torch.empty(count, dtype=torch.uint8)


def empty_on_large_pages(*shape: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized memory for what is read at every step: weights, keys and values.

    On large pages, where the system offers them: a processor's prefetching ends with a page, and a virtual machine pays
    twice for finding the next one.
    """
    tensor = torch.empty(shape, dtype=dtype)
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    first = -(-tensor.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
    size = (tensor.data_ptr() + tensor.nbytes - first) // _LARGE_PAGE * _LARGE_PAGE
    if advise is not None and sys.platform == "linux" and size > 0:
        # What it answers does not matter: without large pages all is the same, only slower.
        advise(c_void_p(first), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    return tensor


def multiply(x: Tensor, op: Linear | Dense, call: Call, scratch_per_row: int) -> Tensor:
    """x [M, K] -> [M, N] of the same dtype by ``op``, which ``call`` runs."""
    m = x.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty(m, op.n, dtype=x.dtype)
    scratch = scratch_bytes(m * scratch_per_row)
    op.op.m, op.x_type, op.y_type = m, TYPES[x.dtype], TYPES[x.dtype]
    op.x, op.y, op.scratch = x.data_ptr(), y.data_ptr(), scratch.data_ptr()
    op.x_stride, op.y_stride = x.stride(0), op.n
    call()
    return y
