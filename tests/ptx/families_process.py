"""Runs families.py in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def verdicts(*words: str) -> dict[str, dict]:
    """What families.py prints, by family."""
    command = [sys.executable, str(Path(__file__).with_name("families.py")), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return {result["family"]: result for result in map(json.loads, done.stdout.splitlines())}


def check(results: dict[str, dict], families: list[str]) -> None:
    """Fail unless these families have passed, and were executed."""
    assert list(results) == families
    for result in results.values():
        assert result["failure"] is None and result["steps"] > 500, result
