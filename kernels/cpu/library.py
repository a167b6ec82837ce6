"""The native library: its operations as structs (src/ops.h), and running them.

``native()`` loads it on first use. It is built by the normal install where there is a C++ compiler (build.py); without
it, the torch implementations run.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import Structure, c_bool, c_char_p, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

FILE = Path(__file__).with_name("_native.so")

#: Kinds of operations, in the order of src/ops.h.
LINEAR, DENSE, EMBEDDING, RMS_NORM, ROTARY, ATTENTION, GATE = range(7)
#: How a quantized product is computed; see src/ops.h.
EXACT, BLOCKS, ROWS = range(3)
TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}


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


STRUCTS: dict[int, type[Structure]] = {LINEAR: Linear, DENSE: Dense}


class Native:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
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
                raise OSError(f"{path} was built from other sources: {struct.__name__} has {size} bytes in it")
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

    def run(self, *ops: Structure) -> None:
        """Run operations one after the other on torch's number of threads."""
        pointers = (c_void_p * len(ops))(*(ctypes.addressof(op) for op in ops))
        self.library.aiakq_run(pointers, len(ops), torch.get_num_threads())


@lru_cache(maxsize=1)
def native() -> Native:
    """The library. Raises OSError if it is not there or does not fit."""
    return Native(FILE)


def unavailable() -> str | None:
    """None if the library can be used, else one sentence why not."""
    try:
        native()
    except (OSError, AttributeError) as problem:
        if not FILE.exists():
            return "the native kernels were not built; install again where there is a C++ compiler (g++ or clang++)"
        return f"the native kernels could not be loaded: {problem}"
    return None


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's data begin, or None for none."""
    return None if tensor is None else tensor.data_ptr()


def scratch_bytes(count: int) -> Tensor:
    """``count`` bytes of uninitialized memory whose first is at a multiple of 64: torch's allocator sees to that."""
    return torch.empty(count, dtype=torch.uint8)
