"""A fixed sample of the malicious checkpoints and tokenizers of ``make hostile``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parent.parent / "hostile_models" / "run.py"


@pytest.mark.slow
def test_a_share_of_malicious_models_is_refused_or_harmless() -> None:
    done = subprocess.run([sys.executable, str(RUN), "--sample", "25"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert int(done.stdout.rpartition("\nall ")[2].split()[0]) >= 20


@pytest.mark.parametrize(
    ("only", "cases"), [("lc-", 20), pytest.param("", 160, marks=pytest.mark.slow)], ids=["some", "every format"]
)
def test_mutated_files_are_refused_or_have_their_values(only: str, cases: int) -> None:
    """``make fuzz`` runs thousands of cases."""
    words = [str(RUN.with_name("mutated.py")), "--cases", str(cases), "--only", only]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    refused, unchanged = map(int, done.stdout.rpartition("\nall ")[2].split()[:2])
    assert refused > cases / 3 and unchanged > 0
