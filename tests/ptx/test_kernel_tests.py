"""Some of tests/kernels/triton on the emulator, for sm_90. ``make ptx`` runs all of it, for sm_80 and sm_90."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "kernels" / "triton"
#: Kernels that take a moment to compile, and one with Hopper's products.
QUICK = [
    "test_triton_w8a8.py", "test_triton_rows.py", "test_triton_sampling.py",
    "test_triton_linear.py::test_rows_of_a_wider_tensor",
]  # fmt: skip


@pytest.mark.timeout(900)
def test_some_tests_of_kernels_pass_on_sm_90():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--lane", "fast"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, *(str(TESTS / name) for name in QUICK)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"KERNEL_PTX": "90", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None and int(found[1]) >= 15 and "skipped" not in done.stdout, done.stdout
