"""The fake GPU of a test."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

if torch.cuda.is_available() or "KERNEL_PTX" in os.environ or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> Iterator[object]:
    """A fake GPU; what it finds that the test does not expect fails the test."""
    from fake_cuda.install import fake_cuda

    with fake_cuda() as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter computes with numpy in a way that warns."""
    for item in items:
        if "fake_cuda" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
