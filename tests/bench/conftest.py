"""A real server with the example model, shared by the tests that put load on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiakq.server.background import RunningServer, start_in_background


@pytest.fixture(scope="session")
def bench_server(example_model) -> Iterator[RunningServer]:
    """Serves the example model under the name ``tinybooks`` on a free port, in a process of its own."""
    arguments = {
        "model": str(example_model),
        "dtype": "float32",
        "num_gpu_blocks_override": 513,
        "served_model_name": ["tinybooks"],
    }
    with start_in_background(arguments, timeout=120) as running:
        yield running
