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
