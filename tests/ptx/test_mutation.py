"""The self-tests find mutants of the kernels: a few of them here, more with ``make ptx MUTATE=4``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def scores(arch: str, *words: str) -> list[dict]:
    """What mutation.py prints for an architecture."""
    pytest.importorskip("triton")
    command = [sys.executable, str(Path(__file__).with_name("mutation.py")), arch, *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(900)
def test_mutants_are_found():
    """Some of the kernels of three families."""
    for score in scores("80", "gated norm", "sampling", "convolution", "--per-kind", "2"):
        assert score["score"] >= 0.95, score["survived"]
        assert sum(score["found"].values()) >= 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("arch", "family"), [("90", "LoRA"), ("80", "experts"), ("90", "weight-only linear")])
def test_mutants_of_long_families_are_found(arch, family):
    (score,) = scores(arch, family, "--per-kind", "1")
    assert score["score"] >= 0.95, score["survived"]
    assert sum(score["found"].values()) >= 10
