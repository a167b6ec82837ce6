"""Mistakes that only compiled code shows: in Triton's interpreter, both of these kernels are right."""

from __future__ import annotations

import importlib.util

import pytest
from ptx.families_process import verdicts

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)


@pytest.mark.timeout(900)
def test_a_miscompiled_recurrence_is_found():
    """Of a recurrence that carries where the tokens of a state begin."""
    assert "are off by" in verdicts("80", "recurrence", "--carried")["recurrence"]["failure"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_race_between_warps_is_found():
    """Without the barrier of the GPTQ sweep, warps may read what one of them has already replaced."""
    assert "PtxFault: race" in verdicts("80", "GPTQ", "--racing")["GPTQ"]["failure"]
