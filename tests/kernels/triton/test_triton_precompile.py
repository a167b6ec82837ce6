"""Kernels compiled into Triton's cache for GPUs that are not present."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aiakq.kernels.triton import configs, precompile, self_test


def precompiled(cache: Path) -> dict[str, set[str]]:
    """Compile a family for sm_89 as an image does, and return the names of the files per entry of the cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "aiakq.kernels.triton.precompile", "--arch", "89", "--family", "sampling"],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sm_89: 1 kernels compiled\n"
    return {entry.name: {file.name for file in entry.iterdir()} for entry in cache.iterdir()}


def test_what_is_compiled_without_a_gpu_is_found_again(tmp_path):
    first = precompiled(tmp_path)
    assert sum("mask_kernel.cubin" in files for files in first.values()) == 1
    assert precompiled(tmp_path) == first


def test_launches_are_those_of_the_gpu_that_is_assumed():
    device = torch.device("cpu")
    interpreted = configs.gpu(device)
    if torch.cuda.is_available() or interpreted.processors != 1:
        pytest.skip("for the interpreter")
    alone = configs.choose("grouped", device, 4, 192, 8, 1).split
    configs.assume(configs.Gpu("default", precompile.PROCESSORS[80], 80))
    try:
        assert configs.gpu(device).generation == 8 and configs.choose("grouped", device, 4, 192, 8, 1).split > alone
    finally:
        configs.assume(interpreted)


def test_a_kernel_that_does_not_compile_fails_the_build(monkeypatch):
    def broken(device: torch.device) -> float:
        raise RuntimeError("no such instruction")

    from triton.runtime import driver, jit

    monkeypatch.setitem(self_test.FAMILIES, "norm", broken)
    monkeypatch.setattr(jit.JITFunction, "__getitem__", jit.JITFunction.__getitem__)
    monkeypatch.setattr(driver, "set_active", lambda absent: None)
    interpreted = configs.gpu(torch.device("cpu"))
    try:
        with pytest.raises(
            RuntimeError, match=r"the norm kernels do not compile for sm_89:\n(.*\n)*.*no such instruction"
        ):
            precompile.compile_for(89, ["norm"])
    finally:
        configs.assume(interpreted)
