"""The tests of the native kernels with address and thread sanitizers: ``make sanitize``.

With the first one, malicious weights, adapters and heads are loaded, too.

Needs GCC with its sanitizers, on Linux. Findings are printed and fail the test run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from aiakq.kernels.cpu import build

ROOT = Path(__file__).resolve().parent.parent.parent.parent
#: These start processes, or build and load libraries of their own, which would not be checked.
EXCLUDED = ("tests/kernels/cpu/test_build.py", "tests/kernels/cpu/test_threads.py")
#: Families of tests/hostile_models whose numbers native kernels read.
HOSTILE = ("quantized weights", "adapters", "heads")
#: The library's threads are checked; torch and its OpenMP runtime are not instrumented.
SUPPRESSIONS = (
    "called_from_lib:libtorch_cpu.so\ncalled_from_lib:libgomp.so.1\nrace:libtorch_cpu.so\nrace:libgomp.so.1\n"
)


def run(check: str, only: list[str]) -> int:
    """Build with one sanitizer and run the tests; returns the exit status."""
    folder = ROOT / "build" / "sanitize" / check
    library = folder / "_native.so"
    build.main(["--sanitize", check, "--output", str(library)])
    suppressions = folder / "suppressions"
    suppressions.write_text(SUPPRESSIONS)
    compiler = build.find_compiler().command
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[check]
    preload = [
        subprocess.check_output([*compiler, f"-print-file-name={name}"], text=True).strip()
        for name in (runtime, "libstdc++.so.6")
    ]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preload),
        "AIAKQ_CPU_LIBRARY": str(library),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": f"suppressions={suppressions}:halt_on_error=1:ignore_noninstrumented_modules=1",
        "OMP_NUM_THREADS": "4",
    }
    # The thread sanitizer needs a fixed memory layout.
    command = ["setarch", "-R"] if shutil.which("setarch") else []
    command += [sys.executable, "-P", "-m", "pytest", "-q", "--capture=sys", "-o", "timeout=1800"]
    command += only or ["tests/kernels", *(f"--ignore={name}" for name in EXCLUDED)]
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if check == "address" and not only:
        for family in HOSTILE:
            command = [
                sys.executable,
                "-P",
                "tests/hostile_models/run.py",
                "--seconds",
                "300",
                "--only",
                f"{family} / ",
            ]
            code |= subprocess.run(command, cwd=ROOT, env=environment).returncode
    return code


if __name__ == "__main__":
    checks = [name for name in build.SANITIZERS if name in sys.argv[1:]] or list(build.SANITIZERS)
    failed = [check for check in checks if run(check, [word for word in sys.argv[1:] if word not in build.SANITIZERS])]
    raise SystemExit(f"found by: {', '.join(failed)}" if failed else None)
