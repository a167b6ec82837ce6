"""The product's self-test with compiled kernels on the emulator. ``make ptx`` runs tests/kernels/triton there, too."""

from __future__ import annotations

import importlib.util

import pytest
from ptx.families_process import verdicts

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

#: Those that take a moment, and the others.
QUICK = ["norm", "activation", "gated norm", "sampling", "convolution", "recurrence", "attention", "GPTQ"]
LONG = ["LoRA", "latent attention", "w8a8 linear", "weight-only linear"]


def check(results: dict[str, dict], families: list[str]) -> None:
    assert list(results) == families
    for result in results.values():
        assert result["failure"] is None and result["steps"] > 500, result


@pytest.mark.timeout(900)
def test_quick_families_agree_with_torch_on_sm_80():
    check(verdicts("80", *QUICK, "--random", "1"), QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quick_families_agree_with_torch_on_sm_90():
    check(verdicts("90", *QUICK, "--random", "1"), QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", LONG)
def test_long_families_agree_with_torch_on_sm_90(family):
    check(verdicts("90", family, "--random", "1"), [family])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", LONG)
def test_long_families_agree_with_torch_on_sm_80(family):
    check(verdicts("80", family, "--random", "1"), [family])
