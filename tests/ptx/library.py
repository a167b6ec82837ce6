"""Builds the emulator's C++ core from src/ into the build folder, and loads it. It is never installed."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path

from aiakq.kernels.cpu import build

SOURCES = Path(__file__).parent / "src"
FOLDER = Path(__file__).resolve().parents[2] / "build" / "ptx"


class Line(ctypes.Structure):
    """An instruction; see machine.cpp."""

    _fields_ = [
        ("name", c_char_p),
        *[(field, c_int32) for field in ("first", "count", "guard", "negated", "target")],
    ]


class Operand(ctypes.Structure):
    """A register or a constant; see emulator.h."""

    _fields_ = [
        ("displacement", c_int64), ("offset", c_int32), ("size", c_uint8), ("constant", c_uint8),
        ("unused", c_uint8 * 2),
    ]  # fmt: skip


class Region(ctypes.Structure):
    """Memory that a kernel may use, from ``begin`` up to ``end``."""

    _fields_ = [("begin", c_uint64), ("end", c_uint64)]


class Options(ctypes.Structure):
    """See emulator.h."""

    _fields_ = [("seed", c_uint64), ("limit", c_int64), ("truncate", c_int32), ("approximate", c_int32)]


@lru_cache
def library() -> ctypes.CDLL:
    """Return the library, built if its sources have changed."""
    loaded = ctypes.CDLL(str(_built()))
    loaded.ptx_program.restype = c_void_p
    loaded.ptx_program.argtypes = [
        POINTER(Line), c_int32, POINTER(Operand), c_int32, c_char_p, c_int32, POINTER(c_uint32), c_int32,
        POINTER(c_int32), c_int32, c_int32, POINTER(c_int32),
    ]  # fmt: skip
    loaded.ptx_free.argtypes = [c_void_p]
    loaded.ptx_fill.argtypes = [c_uint64, c_uint64]
    loaded.ptx_run.argtypes = [
        c_void_p, POINTER(c_uint32), c_char_p, c_int32, POINTER(Region), c_int32, POINTER(Options), POINTER(c_uint64),
        ctypes.c_char_p, c_int32, POINTER(c_int32),
    ]  # fmt: skip
    return loaded


def _built() -> Path:
    """Compile what has changed, each file named after all that decides its contents; processes wait for each other."""
    compiler = build.find_compiler(openmp=False)
    flags = (*build.FLAGS, *build.WARNINGS, *_processor_flags(compiler.x86))
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.h")))
    # Those that take longest first.
    files = sorted(SOURCES.glob("*.cpp"), key=lambda path: path.stem not in ("integers", "conversions"))

    def key(*parts: bytes) -> str:
        return hashlib.sha256(b"\0".join((compiler.version.encode(), " ".join(flags).encode(), *parts))).hexdigest()[
            :16
        ]

    objects = {path: FOLDER / f"{path.stem}-{key(headers, path.read_bytes())}.o" for path in files}
    target = FOLDER / f"emulator-{key(*(object.name.encode() for object in objects.values()))}.so"
    if target.exists():
        return target
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [path for path in files if not objects[path].exists()]
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            command = [*compiler.command, *flags, "-c"]
            list(pool.map(lambda path: _run([*command, str(path)], objects[path]), missing))
        if not target.exists():
            _run([*compiler.command, "-shared", *flags, *map(str, objects.values())], target)
        for stale in {*FOLDER.glob("*.o"), *FOLDER.glob("*.so")} - {target, *objects.values()}:
            stale.unlink()
    return target


def _processor_flags(x86: bool) -> tuple[str, ...]:
    """Return those for AVX2 where this machine has it: lanes are vectors."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text().split()) if info.exists() else set()
    return build.X86["avx2"] if x86 and {"avx2", "fma", "f16c"} <= words else ()


def _run(command: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        made = Path(folder, target.name)
        subprocess.run([*command, "-o", str(made)], check=True)
        made.replace(target)
