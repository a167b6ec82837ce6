"""Builds src/guard.cpp into the build folder, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from aiakq.kernels.cpu import build

SOURCE = Path(__file__).parent / "src" / "guard.cpp"
FOLDER = Path(__file__).resolve().parents[2] / "build" / "fake_cuda"


@lru_cache
def library() -> ctypes.CDLL:
    """Return the library, built for this torch if it is not there yet."""
    name = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = FOLDER / f"guard-{name}.so"
    if not target.exists():
        folder = Path(torch.__file__).parent
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as made:
            out = Path(made, target.name)
            flags = ["-std=c++20", "-shared", "-fPIC", f"-I{folder / 'include'}", f"-L{folder / 'lib'}", "-lc10"]
            command = [*build.find_compiler(openmp=False).command, str(SOURCE), *flags, "-o", str(out)]
            subprocess.run(command, check=True)
            os.replace(out, target)
    return ctypes.CDLL(str(target))
