"""The library and torch share one OpenMP runtime, and use no more threads than torch alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aiakq.kernels.cpu import build

# In a process of its own: the runtimes a test run has loaded, and its threads, are not only ours.
PRELUDE = """
import os, torch
from aiakq.kernels.cpu import library
from aiakq.kernels.ops import Ops

def threads():
    return len(os.listdir("/proc/self/task"))

def busy():
    a = torch.randn(700, 700)
    return (a @ a).exp().sum()

def ours():
    return layer(x)

layer = Ops(torch.device("cpu"), torch.float32).dense(torch.randn(4096, 256))
x = torch.randn(8, 256)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc on this system")


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def needs_openmp(native):
    if b"libgomp" not in build.TARGET.read_bytes():
        pytest.skip("the library was built without OpenMP and starts threads of its own")


def test_only_one_openmp_runtime_is_loaded(native):
    files = run("ours(); busy(); print(*library.openmp_runtimes(), sep='\\n')").splitlines()
    assert len(files) == 1, files


def test_torch_and_the_library_share_their_threads():
    """The first user creates the threads; the second adds none, nor does alternating between them."""
    for first, second in (("ours", "busy"), ("busy", "ours")):
        counts = run(
            f"""
            torch.set_num_threads(4)
            {first}(); before = threads()
            for _ in range(5):
                {second}(); {first}()
            print(before, threads())
            """,
            OMP_NUM_THREADS="4",
        ).split()
        assert counts[0] == counts[1], (first, counts)


def test_as_many_threads_run_as_torch_is_set_to():
    counts = run(
        """
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            before = threads()
            ours()
            print(threads() - before)
        """,
        OMP_NUM_THREADS="1",
    ).split()
    # One runs on the caller alone; each further one is made once and kept for the next call.
    assert counts == ["0", "1", "2"]
