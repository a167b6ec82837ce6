"""ServedSide: run ``aiakq serve`` for one side of ``bench ab --serve`` and measure it over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from types import TracebackType

import httpx

from aiakq.arguments.server import ARGUMENTS
from aiakq.bench import client as http
from aiakq.bench.client import Endpoint, Timing
from aiakq.bench.comparison.sides import Side
from aiakq.bench.comparison.worker import digest
from aiakq.bench.workload import WorkloadRequest, known_size, random_requests
from aiakq.errors import error
from aiakq.system.child import Child

#: Disables admission limits: a comparison must not measure rejected requests.
_NO_LIMITS = {"max_num_queued_reqs": 1 << 30, "max_num_queued_tokens": 1 << 40}
#: Seconds between two readiness checks.
_POLL_INTERVAL = 0.05


class ServedSide:
    """Server of one side, with the interface of ``SideProcess``.

    The constructor starts the server, ``ready`` waits until it is healthy, leaving the context kills it.

    load     batch_size, input_len and output_len.
    timeout  maximum seconds for startup and for each response.
    library  native library to load instead of the side's own, or None.
    """

    def __init__(self, side: Side, load: Mapping[str, int], timeout: float, library: Path | None) -> None:
        self._side, self._load, self._timeout = side, load, timeout
        self._began = time.perf_counter()
        self._settings = tempfile.NamedTemporaryFile("w", suffix=".json", prefix="aiakq-ab-")
        port = _free_port()
        keys = {row.name: row.key for row in ARGUMENTS}
        settings = {keys.get(name, name): value for name, value in side.engine.items() if value is not None}
        json.dump({**_NO_LIMITS, **settings, "host": "127.0.0.1", "port": port}, self._settings)
        self._settings.flush()
        command = [side.interpreter, "-P", "-m", "aiakq", "serve", "--config", self._settings.name]
        self._child = Child(command, side.environment(library), num_sockets=0, keep_output=True)
        self._runner = asyncio.Runner()
        self._client = http.open_client(f"http://127.0.0.1:{port}", None, timeout)
        self._endpoint = Endpoint("/v1/completions", "", True)
        self._vocab_size = 0

    def ready(self) -> dict[str, object]:
        """Wait until the server is healthy. Returns its load time in seconds, version and build facts.

        Raises ``side_failed``.
        """
        return self._runner.run(self._ready())

    async def _ready(self) -> dict[str, object]:
        deadline = time.monotonic() + self._timeout
        while not await self._is_ready():
            if self._child.process.poll() is not None:
                raise self._failure(self._child.exit_reason())
            if time.monotonic() > deadline:
                raise self._failure(f"it was not ready within {self._timeout:g} s")
            await asyncio.sleep(_POLL_INTERVAL)
        loaded = time.perf_counter() - self._began
        model = await http.served_model(self._client, None)
        self._endpoint = Endpoint("/v1/completions", model.name, True)
        self._vocab_size = known_size(model.vocab_size)
        return {"load_s": loaded, "aiakq": model.server_version, "facts": await http.server_facts(self._client)}

    async def _is_ready(self) -> bool:
        try:
            return (await self._client.get("/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    def measure(self, seed: int) -> dict[str, object]:
        """Send one batch of random prompts concurrently. Raises ``side_failed`` if a request fails.

        Returns mean latencies and CPU time in seconds, peak memory in bytes, and a digest of the generated text.
        """
        return self._runner.run(self._measure(seed))

    async def _measure(self, seed: int) -> dict[str, object]:
        load = self._load
        requests = random_requests(
            load["batch_size"], load["input_len"], load["output_len"], self._vocab_size, random.Random(seed)
        )
        timings = [Timing(scheduled=time.perf_counter()) for _ in requests]
        cpu = _cpu_seconds(self._processes())
        await asyncio.gather(*map(self._complete, requests, timings))
        cpu = _cpu_seconds(self._processes()) - cpu
        failed = next((timing.error for timing in timings if timing.error), None)
        if failed is not None:
            exited = self._child.process.poll() is not None
            raise self._failure(self._child.exit_reason() if exited else failed.rstrip("."))
        later = [timing.tpot for timing in timings if timing.tpot is not None]
        return {
            "ttft_s": fmean(timing.ttft for timing in timings),
            "tpot_s": fmean(later) if later else None,
            "e2el_s": fmean(timing.e2el for timing in timings),
            "cpu_s": cpu or None,
            "peak_bytes": sum(map(_peak_bytes, self._processes())) or None,
            "digest": digest([[*timing.text.encode()] for timing in timings]),
        }

    async def _complete(self, request: WorkloadRequest, timing: Timing) -> None:
        await http.complete(self._client, self._endpoint, request, timing)

    def __enter__(self) -> ServedSide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()
        # Child processes exit with the server, but one that is still loading a model would notice too late.
        for pid in self._processes():
            with contextlib.suppress(OSError):  # it has already exited
                os.kill(pid, signal.SIGKILL)
        self._child.end()
        self._child.close()
        self._settings.close()

    def _processes(self) -> list[int]:
        """Return the process ids of the server and of all its descendants."""
        pids = [self._child.pid]
        for pid in pids:
            pids += _children(pid)
        return pids

    def _failure(self, reason: str) -> Exception:
        return error("side_failed", side=self._side.label, reason=reason)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _children(pid: int) -> list[int]:
    """Return the process ids of the children of ``pid``; empty on systems other than Linux."""
    children: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    except OSError:
        pass
    return children


def _cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time of ``pids`` so far in seconds; 0 if the system does not report it."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def _peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process in bytes; 0 if the system does not report it."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0
