"""Every launch configuration compiled for GPUs that are not there: it fits, nothing is spilled, loads run ahead.

Instructions per weight are what decides at small batches (docs/performance.md): more than were recorded fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


# All of it is compiled at the first run, about a second each; after that Triton remembers.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def made() -> list[dict]:
    """What compile_all.py says, in a process where Triton compiles and does not interpret."""
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_all.py")],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_configuration_fits(made):
    for kernel in made:
        assert kernel["shared"] <= kernel["most_shared"], kernel
        assert kernel["registers"] <= 255 and kernel["stack"] == 0, kernel


def test_nothing_is_computed_in_64_bits(made):
    for kernel in made:
        assert not kernel["double"], kernel


def test_loads_in_main_loops_run_ahead(made):
    """cp.async, not loads that are waited for."""
    for kernel in made:
        if kernel["matrix"]:
            assert "LDG" not in kernel["loop"] and kernel["loop"]["LDGSTS"], kernel


def test_recurrences_load_tokens_ahead(made):
    """Their loops have no matrices, but wait for no load either."""
    recurrences = [kernel for kernel in made if kernel["name"].split(" sm")[0] in ("delta rule", "state space")]
    assert len(recurrences) == 6 and all(kernel["copies"] >= 9 for kernel in recurrences)


def test_the_tensor_core_that_is_meant_multiplies(made):
    for kernel in made:
        assert not kernel["matrix"] or kernel["loop"].get(kernel["matrix"]), kernel


def test_instructions_are_no_more_than_recorded(made):
    """Recorded by ``python tests/kernels/triton/compile_all.py --record``, for the Triton of constraints.txt."""
    recorded = json.loads((HERE / "instructions.json").read_text())
    assert recorded.keys() == {kernel["name"] for kernel in made}
    for kernel in made:
        limit = recorded[kernel["name"]] * 1.05
        assert kernel["per_weight"] <= limit, (kernel["name"], kernel["per_weight"], limit)


def test_the_main_one_is_within_its_budget(made):
    few = [
        kernel for kernel in made if kernel["arch"] == 90 and kernel["kind"] == "w4a16 g128" and kernel["rows"] <= 16
    ]
    assert few and all(kernel["per_weight"] <= 2.5 for kernel in few)


def test_decoding_over_caches_of_eight_bits_is_within_its_budget(made):
    """Seven instructions for each element are what an H200 can issue while one arrives."""
    cached = [
        kernel
        for kernel in made
        if kernel["arch"] == 90 and kernel["kind"] == "decode" and "bf16" not in kernel["name"]
    ]
    assert len(cached) == 3 and all(kernel["per_weight"] <= 7 for kernel in cached)
