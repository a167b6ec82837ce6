"""A server of the example model, shared by the tests that need one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from aiakq.server.background import RunningServer, start_in_background


@pytest.fixture(scope="session")
def start_bench_server(example_model) -> Callable[..., AbstractContextManager[RunningServer]]:
    """``start_bench_server(**arguments)`` serves the example model as ``tinybooks`` on a free port, in a process of its
    own.
    """

    def start(**arguments: Any) -> AbstractContextManager[RunningServer]:
        common = {
            "model": str(example_model),
            "dtype": "float32",
            "num_gpu_blocks_override": 513,
            "served_model_name": ["tinybooks"],
        }
        return start_in_background({**common, **arguments}, timeout=120)

    return start


@pytest.fixture(scope="session")
def bench_server(start_bench_server) -> Iterator[RunningServer]:
    """One without other arguments."""
    with start_bench_server() as running:
        yield running
