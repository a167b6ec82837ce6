"""Subprocesses of tests: a new Python interpreter, and check-jsonschema."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def printed_by(code: str) -> str:
    """Run ``code`` in a new Python interpreter; return what it prints, without the last line break."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def check_schema(schema: str, file: Path) -> None:
    """Assert that ``file`` satisfies ``schema``, one that check-jsonschema has. Skips where that is not installed."""
    program = shutil.which("check-jsonschema", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("check-jsonschema is not installed: pip install check-jsonschema")
    done = subprocess.run([program, "--builtin-schema", schema, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
