"""Ranks need the native kernels."""

from __future__ import annotations

import pytest

from aiakq.kernels.cpu import library


@pytest.fixture(autouse=True)
def ranks_are_available() -> None:
    reason = library.unavailable()
    if reason is not None:
        pytest.skip(reason)
