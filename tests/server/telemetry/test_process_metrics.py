"""Metrics of the server's processes."""

from __future__ import annotations

import os

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import aiakq
from aiakq.server.telemetry.process_metrics import EngineProcessCollector


def test_processes_and_the_build_are_exported(server, metrics_of):
    samples = metrics_of(server.url)
    assert samples["process_resident_memory_bytes"] > 1 << 20 and samples["process_open_fds"] > 3
    assert samples["process_cpu_seconds_total"] > 0 and samples["process_start_time_seconds"] > 1e9
    # Their label is the engine's number, which the fixture leaves out.
    assert samples["aiakq:engine_process_resident_memory_bytes"] > 1 << 20
    assert samples["aiakq:engine_process_cpu_seconds_total"] > 0
    [family] = [
        family
        for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", trust_env=False).text)
        if family.name == "aiakq:build_info"
    ]
    labels = family.samples[0].labels
    assert labels["version"] == aiakq.__version__ and labels["torch"] and labels["dtype"] == "float32"
    assert (labels["device"], labels["quantization"]) == ("cpu", "not quantized")


def test_an_engine_that_is_gone_has_no_samples(tmp_path):
    registry = CollectorRegistry()
    registry.register(EngineProcessCollector(lambda: [os.getpid(), 2**22 + 1]))
    found = [(sample.name, sample.labels["engine"]) for family in registry.collect() for sample in family.samples]
    assert found == [
        ("aiakq:engine_process_resident_memory_bytes", "0"),
        ("aiakq:engine_process_cpu_seconds_total", "0"),
    ]


def test_the_name_of_a_program_may_be_anything(tmp_path):
    (tmp_path / "7").mkdir()
    times = "11 22"
    (tmp_path / "7" / "stat").write_text(f"7 (a) b) S 1 1 1 0 -1 4 1 2 3 4 {times} 0 0 20 0 1 0 100 5000 42 9\n")
    memory, seconds = EngineProcessCollector(lambda: [7], tmp_path).collect()
    assert memory.samples[0].value == 42 * os.sysconf("SC_PAGE_SIZE")
    assert seconds.samples[0].value == 33 / os.sysconf("SC_CLK_TCK")
