"""Servers of the example model on free ports, each in its own process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from aiakq.server.background import RunningServer, start_in_background

# Modules shared with the programs in this folder are imported by their names, as the programs do.
sys.path.insert(0, str(Path(__file__).parent))

#: Few pages, so that starting is quick and leaks would show.
ARGUMENTS = {"dtype": "float32", "num_gpu_blocks_override": 513, "served_model_name": ["tinybooks", "alias/name"]}


@pytest.fixture(scope="session")
def start_server(example_model) -> Callable[..., RunningServer]:
    """``start_server(**arguments)`` -> a ready server; the caller stops it."""

    def start(**arguments: Any) -> RunningServer:
        return start_in_background({"model": str(example_model), **ARGUMENTS, **arguments}, timeout=240)

    return start


@pytest.fixture(scope="session")
def server(start_server) -> Iterator[RunningServer]:
    """The server shared by tests that do not change its state."""
    with start_server() as running:
        yield running


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    """A plain HTTP client of the shared server."""
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def client(server) -> Iterator[OpenAI]:
    """OpenAI's own client of the shared server."""
    with httpx.Client(trust_env=False) as plain:
        yield OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=plain)


@pytest.fixture(scope="session")
def metrics_of() -> Callable[[str], dict[str, float]]:
    """``metrics_of(url)`` -> every sample of /metrics, by name and labels (without model_name and engine)."""
    from prometheus_client.parser import text_string_to_metric_families

    def read(url: str) -> dict[str, float]:
        text = httpx.get(f"{url}/metrics", trust_env=False).text
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
                rest = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
                samples[f"{sample.name}{{{rest}}}" if rest else sample.name] = sample.value
        return samples

    return read
