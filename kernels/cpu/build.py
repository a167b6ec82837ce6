"""Builds the native library from src/, during installation or with ``python -m aiakq.kernels.cpu.build``.

A file with code in ``namespace ISA`` is compiled once per instruction set, other files once; the library selects an
instruction set when it is loaded. Object files are named after a hash of all their inputs, so that only changed files
are recompiled. Standard library only: setup.py loads this file by its path, before the installation.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
TARGET = HERE / "_native.so"
COMMAND = "python -m aiakq.kernels.cpu.build"

# Without implicit fused multiply-add, all compilers produce the same results.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread")
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-unknown-pragmas")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
#: Compiler flags per instruction set. library.cpp lists the same names with their CPU requirements; its vnni_bf16 uses
#: the vnni code on machines with bfloat16 dot products.
X86 = {"vnni": (*_AVX512, "-mavx512vnni"), "avx512": _AVX512, "avx2": _AVX2, "portable": ("-O1",)}
ELSEWHERE = {"portable": ()}
# Where a product of bytes takes several instructions, GCC would compute all products of a sum before adding them up,
# which needs far more registers than there are.
GCC_FLAGS = dict.fromkeys(("avx512", "avx2"), ("-fno-tree-reassoc", "-fno-tree-ter"))

SANITIZERS = {
    "address": ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-O1", "-g1", "-fsanitize=thread"),
}


class BuildError(Exception):
    """Raised when the library cannot be built; the message is one sentence with the reason."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, version text, target, and OpenMP flags."""

    command: tuple[str, ...]
    version: str
    x86: bool
    threads: tuple[str, ...]


@dataclass(frozen=True)
class Unit:
    """One file to compile, and its command without the output file; run in the source folder."""

    source: Path
    label: str
    command: tuple[str, ...]


def abi() -> str:
    """Return a hash of the interface between Python and the library: ops.def and the files with exported functions."""
    parts = [SOURCES / "ops.def", *(path for path in sorted(SOURCES.glob("*.cpp")) if 'extern "C"' in path.read_text())]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in parts)).hexdigest()[:16]


def build(
    target: Path, objects: Path | None, flags: Sequence[str] = (), openmp: bool = True, link_openmp: bool = True
) -> int:
    """Compile changed files, link ``target`` and return the number of files compiled.

    ``objects`` is the folder for object files of this target, from which stale ones are deleted; None keeps none.
    ``target`` is replaced atomically, so that processes using the old library are not affected.
    ``link_openmp`` links the OpenMP runtime by name; without it the library can only be loaded after torch, whose
    runtime it then uses under any name, which wheels for other machines require. Raises BuildError.
    """
    if objects is None:
        with tempfile.TemporaryDirectory() as folder:
            return build(target, Path(folder), flags, openmp, link_openmp)
    compiler = find_compiler(openmp)
    units = _units(compiler, tuple(flags))
    objects = objects.absolute()
    objects.mkdir(parents=True, exist_ok=True)
    with _locked(objects):
        return _build(target, objects, compiler, units, flags, link_openmp)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from compiling into ``folder`` at the same time: they wait, and find everything done."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build(
    target: Path, objects: Path, compiler: Compiler, units: list[Unit], flags: Sequence[str], link_openmp: bool
) -> int:
    """Compile those of ``units`` that have changed and link ``target``; returns how many files were compiled."""
    object_of = {unit: objects / f"{unit.label}-{_fingerprint(unit, compiler)}.o" for unit in units}
    for stale in set(objects.glob("*.o")) - set(object_of.values()):
        stale.unlink()
    missing = [unit for unit in units if not object_of[unit].exists()]
    with ThreadPoolExecutor(_cores()) as pool:
        futures = [pool.submit(_replace, list(unit.command), object_of[unit]) for unit in missing]
        try:
            for future in futures:
                future.result()
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
    threads = compiler.threads if link_openmp else ()
    link = [*compiler.command, "-shared", *FLAGS, *flags, *threads, *map(str, object_of.values())]
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(link, target)
    return len(missing)


def find_compiler(openmp: bool = True) -> Compiler:
    """Return $CXX, or the first of c++, g++ and clang++ that works. Raises BuildError."""
    given = os.environ.get("CXX")
    candidates = [shlex.split(given)] if given else [["c++"], ["g++"], ["clang++"]]
    for command in candidates:
        if not command or not shutil.which(command[0]):
            continue
        try:
            version = _output([*command, "--version"])
            x86 = _output([*command, "-dumpmachine"]).startswith(("x86_64", "amd64"))
        except BuildError:
            continue
        return Compiler(tuple(command), version, x86, _openmp(command, version) if openmp else ())
    raise BuildError("no C++ compiler was found (" + (f"CXX is {given}" if given else "g++ or clang++") + ")")


def _openmp(command: list[str], version: str) -> tuple[str, ...]:
    """Return -fopenmp if it selects GNU's runtime, which torch uses on Linux.

    Another runtime would create a second thread pool; without OpenMP, library.cpp starts its own threads.
    """
    if "clang" in version or not sys.platform.startswith("linux"):
        return ()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.cpp")
        source.write_text("#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n")
        try:
            _output([*command, "-fopenmp", str(source), "-o", str(Path(folder, "try"))])
        except BuildError:
            return ()
    return ("-fopenmp",)


def _units(compiler: Compiler, flags: tuple[str, ...]) -> list[Unit]:
    """List all files to compile, those that take longest first."""
    units = []
    for source in sorted(SOURCES.glob("*.cpp"), key=lambda path: -_size(path)):
        sets = X86 if compiler.x86 else ELSEWHERE
        plain = (*compiler.command, *FLAGS, *WARNINGS)
        if "namespace ISA {" in source.read_text():
            for name, own in sets.items():
                gcc = () if "clang" in compiler.version else GCC_FLAGS.get(name, ())
                command = (*plain, f"-DISA={name}", *own, *gcc, *flags, "-c", source.name)
                units.append(Unit(source, f"{source.stem}-{name}", command))
        else:
            command = (*plain, *compiler.threads, f'-DAIAKQ_ABI="{abi()}"', *flags, "-c", source.name)
            units.append(Unit(source, source.stem, command))
    return units


def _size(source: Path) -> int:
    """Return the bytes of a file and of the headers that it includes, by which the time to compile it is guessed."""
    seen, waiting = set(), [source]
    while waiting:
        path = waiting.pop()
        if path not in seen and path.exists():
            seen.add(path)
            waiting += [SOURCES / name for name in re.findall(r'(?m)^#include "([^"]+)"', path.read_text())]
    return sum(path.stat().st_size for path in seen)


def _fingerprint(unit: Unit, compiler: Compiler) -> str:
    """Return a hash of the compiler, the command, the file and all headers."""
    parts = [compiler.version.encode(), *(word.encode() for word in unit.command), unit.source.read_bytes()]
    parts += [header.read_bytes() for pattern in ("*.h", "*.def") for header in sorted(SOURCES.glob(pattern))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _replace(command: list[str], target: Path) -> None:
    """Run ``command`` with its output in a temporary file beside ``target``, then rename that to ``target``."""
    target = target.absolute()
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        _output([*command, "-o", str(partial)])
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _output(command: list[str]) -> str:
    """Return the output of ``command``. Raises BuildError with its first error message."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=SOURCES)
    except OSError as error:
        raise BuildError(f"{command[0]} does not start: {error}") from None
    if done.returncode:
        said = (done.stderr + done.stdout).splitlines()
        errors = [line for line in said if "error" in line.lower()] or said or ["it says nothing"]
        raise BuildError(f"{command[0]} fails: {errors[0].strip()}")
    return done.stdout


def _cores() -> int:
    """Return the number of processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def objects_folder(name: str = "native") -> Path | None:
    """Return the folder for object files in the checkout's build folder; None for an installed copy."""
    root = HERE.parent.parent
    return root / "build" / name if (root / "pyproject.toml").exists() else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Build in place, or a sanitizer build elsewhere; prints one line with the result or the reason for failure."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Build the native CPU kernels.")
    parser.add_argument("--output", type=Path, help="the library to write (default: where it is loaded from)")
    parser.add_argument("--sanitize", choices=sorted(SANITIZERS), help="build with this sanitizer; needs --output")
    options = parser.parse_args(arguments)
    if options.sanitize and not options.output:
        parser.error("--sanitize needs --output: the usual library stays as it is")
    checks = SANITIZERS.get(options.sanitize, ())
    target = options.output or TARGET
    try:
        count = build(
            target,
            objects_folder(f"native-{options.sanitize}" if checks else "native"),
            checks,
            openmp=options.sanitize != "thread",
        )
    except (BuildError, OSError) as problem:
        raise SystemExit(f"the native CPU kernels were not built: {problem}") from None
    shown = target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target
    sys.stderr.write(f"native CPU kernels: {shown} ({f'{count} files compiled' if count else 'up to date'})\n")


if __name__ == "__main__":
    main()
