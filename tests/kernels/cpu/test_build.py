"""The build of the native library, on small sources of its own, and what is said of missing and outdated libraries."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aiakq.kernels.cpu import build, library

ROOT = Path(build.__file__).resolve().parent.parent.parent


@pytest.fixture
def compiler() -> build.Compiler:
    try:
        return build.find_compiler()
    except build.BuildError as problem:
        pytest.skip(str(problem))


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """A folder with one file per instruction set, one compiled once, and a header; the build works on these."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "ops.def").write_text("#pragma once\n#define ANSWER 42\n")
    (folder / "each.cpp").write_text('#include "ops.def"\nnamespace ISA {\nint answer() { return ANSWER; }\n}\n')
    (folder / "once.cpp").write_text(
        '#include "ops.def"\nnamespace portable { int answer(); }\n'
        '#define EXPORT extern "C" __attribute__((visibility("default")))\n'
        "EXPORT int answer() { return portable::answer(); }\n"
        "EXPORT const char* hash() { return AIAKQ_ABI; }\n"
    )
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def test_only_what_changed_is_compiled_again(small, tmp_path, compiler):
    target, objects = tmp_path / "out" / "lib.so", tmp_path / "objects"
    sets = len(build.X86 if compiler.x86 else build.ELSEWHERE)
    assert build.build(target, objects) == sets + 1
    loaded = ctypes.CDLL(str(target))
    loaded.hash.restype = ctypes.c_char_p
    assert loaded.answer() == 42 and loaded.hash().decode() == build.abi()
    assert build.build(target, objects) == 0
    # A file: its own objects. A header, or other flags: all of them. And nothing old stays behind.
    with (small / "each.cpp").open("a") as file:
        file.write("// changed\n")
    assert build.build(target, objects) == sets
    (small / "ops.def").write_text("#pragma once\n#define ANSWER 43\n")
    assert build.build(target, objects) == sets + 1
    assert build.build(target, objects, flags=("-g1",)) == sets + 1
    assert len(list(objects.iterdir())) == sets + 1
    assert loaded.answer() == 42, "a library in use is not changed under its user"


def test_a_compile_error_is_reported_and_keeps_the_old_library(small, tmp_path, compiler):
    target, objects = tmp_path / "lib.so", tmp_path / "objects"
    build.build(target, objects)
    before = target.read_bytes()
    (small / "each.cpp").write_text("namespace ISA {\nint answer() { return UNKNOWN; }\n}\n")
    with pytest.raises(build.BuildError, match=r"each.cpp:2:.*UNKNOWN"):
        build.build(target, objects)
    assert target.read_bytes() == before
    assert not [path for path in (*tmp_path.iterdir(), *objects.iterdir()) if re.search(r"\.\d+$", path.name)]


def test_a_missing_compiler_is_reported_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler was found"):
        build.build(tmp_path / "lib.so", None)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"not built: no C\+\+ compiler was found \(g\+\+ or clang\+\+\)"):
        build.main(["--output", str(tmp_path / "lib.so")])


def test_a_library_without_the_name_of_an_openmp_runtime_uses_torchs(tmp_path, compiler, native):
    if not compiler.threads:
        pytest.skip("this compiler's OpenMP runtime is not torch's")
    target = tmp_path / "_native.so"
    build.build(target, build.objects_folder(), link_openmp=False)
    assert b"libgomp.so.1" not in target.read_bytes() and b"libgomp.so.1" in library.FILE.read_bytes()
    code = (
        "import torch; from aiakq.kernels.cpu.library import load_library; load_library();"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}))"
    )
    environment = {**os.environ, "AIAKQ_CPU_LIBRARY": str(target)}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "1", done.stderr


def test_build_and_library_name_the_same_instruction_sets():
    declared = re.findall(r"^DECLARE\((\w+)\)", (build.SOURCES / "library.cpp").read_text(), re.MULTILINE)
    assert sorted(declared) == sorted(build.X86)


def without(path: str, **environment: str) -> str:
    """What ``unavailable`` says in a process that looks for the library at ``path``."""
    code = "from aiakq.kernels.cpu import library; print(library.unavailable())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "AIAKQ_CPU_LIBRARY": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_library_built_from_other_sources_is_refused(small, tmp_path, compiler, native):
    """One without the function that names its sources, and one that names others; neither is called further."""
    target = tmp_path / "lib.so"
    build.build(target, None)
    assert without(str(target)) == f"the native kernels were built from other sources: run '{build.COMMAND}'"
    with (small / "once.cpp").open("a") as file:
        file.write("EXPORT const char* aiakq_abi() { return AIAKQ_ABI; }\n")
    build.build(target, None)
    assert without(str(target)) == f"the native kernels were built from other sources: run '{build.COMMAND}'"


def test_a_missing_or_broken_library_is_reported(tmp_path):
    assert without(str(tmp_path / "none.so")).startswith("the native kernels ")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    assert without(str(broken)).startswith("the native kernels could not be loaded: ")


def test_an_unknown_instruction_set_is_refused(native):
    assert "does not have the instruction set mmx" in without("", AIAKQ_CPU_ISA="mmx")


def test_the_installed_library_was_built_from_these_sources(native):
    assert native.cdll.aiakq_abi().decode() == build.abi(), f"run '{build.COMMAND}'"
    assert library.unavailable() is None


def test_two_builds_at_once_compile_every_file_once(small, tmp_path, compiler):
    objects, sets = tmp_path / "objects", len(build.X86 if compiler.x86 else build.ELSEWHERE)
    with ThreadPoolExecutor(2) as pool:
        counts = pool.map(lambda number: build.build(tmp_path / f"lib{number}.so", objects), range(2))
        assert sorted(counts) == [0, sets + 1]
