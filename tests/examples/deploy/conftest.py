"""Servers and free ports for the tests of deployments."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aiakq.server.background import RunningServer, start_in_background


@pytest.fixture(scope="session")
def serve(example_model) -> Callable[..., Any]:
    """``with serve(**arguments) as server``: a running server of the example model."""

    @contextmanager
    def start(**arguments: Any) -> Iterator[RunningServer]:
        given = {"model": str(example_model), "dtype": "float32", "num_gpu_blocks_override": 257, **arguments}
        with start_in_background(given, timeout=240) as server:
            yield server

    return start


@pytest.fixture
def free_port() -> Callable[[], int]:
    """``free_port()`` -> an unused port. Call it after starting servers that choose their own port."""

    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find
