"""Triton's kernels on a GPU where there is one, else in Triton's interpreter (which tests/conftest.py asks for).

With KERNEL_PTX=80 or 90, kernels are compiled for that GPU, and the emulator of tests/ptx executes their PTX.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif "KERNEL_PTX" in os.environ:
    from ptx import device as emulator

    emulator.install(int(os.environ["KERNEL_PTX"]))
    # What compiles for a GPU that is absent, and not for the emulator.
    collect_ignore = ["test_triton_compiled.py", "test_triton_precompile.py"]

#: What a result may differ by, relative, root mean square: the interpreter cuts floats off where a GPU rounds them.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 1.2e-2}


@pytest.fixture
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture
def close():
    """``close(found, wanted)``: nothing is left unwritten, and the error is what the dtype allows."""

    def check(found: torch.Tensor, wanted: torch.Tensor, tolerance: float | None = None) -> None:
        assert found.shape == wanted.shape
        assert found.isfinite().all()
        error = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
        assert error < (tolerance or TOLERANCE[found.dtype]), error

    return check


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes with numpy in a way that warns; what comes out of it is what the tests look at."""
    without_float8 = os.environ.get("KERNEL_PTX") == "80"
    for item in items:
        if "kernels/triton" in str(item.path):
            cases = repr(getattr(item, "callspec", None))
            if without_float8 and ("float8" in cases or "fp8" in cases or "fp8" in item.path.name):
                item.add_marker(pytest.mark.skip(reason="GPUs before sm_89 have no floats of 8 bits"))
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
