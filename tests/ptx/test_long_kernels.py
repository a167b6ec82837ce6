"""The rest of test_kernels.py: families that take longer, sm_90, and arithmetic as inexact as a GPU's may be."""

from __future__ import annotations

import importlib.util

import pytest
from ptx.families_process import check, verdicts

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

QUICK = [
    *("norm", "activation", "gated norm", "sampling", "convolution", "recurrence", "selective scan", "attention"),
    "GPTQ",
]
LONG = [
    "w8a8 linear",
    "float linear",
    "4-bit float linear",
    "latent attention",
    "experts",
    "LoRA",
    "weight-only linear",
]


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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quick_families_agree_with_torch_on_sm_90():
    check(verdicts("90", *QUICK, "--random", "1"), QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["80", "90"])
def test_families_bear_sums_that_are_cut_off_and_approximations(arch):
    families = [
        "attention",
        "latent attention",
        "LoRA",
        "recurrence",
        "selective scan",
        "weight-only linear",
        "experts",
    ]
    check(verdicts(arch, *families, "--truncate", "--inexact"), families)
