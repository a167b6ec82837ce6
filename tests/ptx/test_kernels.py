"""The product's self-test with compiled kernels on the emulator. ``make ptx`` runs tests/kernels/triton there, too."""

from __future__ import annotations

import importlib.util

import pytest
from ptx.families_process import check, verdicts

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

#: Those that take a moment; the others are in test_long_kernels.py.
QUICK = [
    *("norm", "activation", "gated norm", "sampling", "convolution", "recurrence", "selective scan", "attention"),
    "GPTQ",
]


@pytest.mark.timeout(900)
def test_quick_families_agree_with_torch_on_sm_80():
    check(verdicts("80", *QUICK, "--random", "1"), QUICK)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["89", "90"])
def test_products_of_8_bit_floats_agree_with_torch(arch):
    """Sums in the tensor core are cut off at 13 bits, and go on in float32."""
    check(verdicts(arch, "fp8 linear", "--random", "1", "--truncate"), ["fp8 linear"])
