"""Metrics of the server's processes, and what the server is made of."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import aiakq

#: Process ids of the engines, in their order.
EnginePids = Callable[[], Sequence[int]]


def add_process_metrics(registry: CollectorRegistry, engine_pids: EnginePids, **model: str) -> None:
    """Add ``process_*`` of this process, the memory and processor time of the engines, and ``aiakq:build_info``.

    model  further labels of ``aiakq:build_info``.
    """
    ProcessCollector(registry=registry)
    registry.register(EngineProcessCollector(engine_pids))
    labels = {
        "version": aiakq.__version__,
        "python": platform.python_version(),
        **{name: _version_of(name) for name in ("torch", "transformers")},
        **model,
    }
    info = Gauge("aiakq:build_info", "1, with what the server is made of as labels.", list(labels), registry=registry)
    info.labels(**labels).set(1)


class EngineProcessCollector(Collector):
    """Memory and processor time of the engine processes, read when they are asked for; Linux only."""

    def __init__(self, pids: EnginePids, proc: Path = Path("/proc")) -> None:
        self._pids, self._proc = pids, proc

    def collect(self) -> Iterable[Metric]:
        """One sample per engine; none for one that is not running."""
        memory = GaugeMetricFamily(
            "aiakq:engine_process_resident_memory_bytes", "Resident memory of an engine process.", labels=["engine"]
        )
        seconds = CounterMetricFamily(
            "aiakq:engine_process_cpu_seconds", "Processor time of an engine process.", labels=["engine"]
        )
        for number, pid in enumerate(self._pids()):
            try:
                # The name of the program may have blanks and parentheses.
                fields = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            memory.add_metric([str(number)], int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))
            seconds.add_metric([str(number)], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return [memory, seconds]


def _version_of(package: str) -> str:
    """The version of an installed package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
