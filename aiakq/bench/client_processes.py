"""Send requests from several client processes, for loads that one event loop cannot sustain."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from aiakq.arguments.bench import WorkloadArguments
from aiakq.bench.client import Endpoint, Timing, open_client
from aiakq.bench.load import ClientLoad, Progress, measure_client, send_at, send_for
from aiakq.bench.local_tokenizer import open_tokenizer
from aiakq.bench.request_source import RequestSource
from aiakq.bench.stopping import StopRule
from aiakq.bench.workload import WorkloadRequest, open_workload
from aiakq.errors import error
from aiakq.system.child import begin_child, child_command, end_child

#: Seconds from when all processes are ready to the first request, and between progress reports of a process.
_START_DELAY, _REPORT_INTERVAL = 0.1, 0.2
_CODE = "from aiakq.bench.client_processes import main; main()"


@dataclass(frozen=True)
class ClosedLoop:
    """A closed-loop load: a fixed number of requests in flight for ``seconds``.

    workload   options of a workload that generates new prompts, or None to repeat the partition's requests.
    tokenizer  arguments of ``open_tokenizer``, used to turn token ids into text for chat.
    adapters   see ``RequestSource``.
    """

    seconds: float
    seed: int
    workload: WorkloadArguments | None = None
    vocab_size: int | None = None
    tokenizer: tuple[str | None, str | None] = (None, None)
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Partition:
    """The requests that one process sends, and the server it sends them to.

    offsets  send times in seconds after the start; empty in a closed loop.
    indices  positions of ``requests`` in the whole load.
    loop     closed loop, or None to send every request once, at its offset.
    """

    base_url: str
    api_key: str | None
    timeout_s: float
    endpoint: Endpoint
    requests: list[WorkloadRequest]
    offsets: list[float]
    indices: list[int]
    max_concurrency: int | None
    on_overload: bool = False
    loop: ClosedLoop | None = None


@dataclass
class Report:
    """Message from a client process: an empty one when it is ready, its progress, and finally its timings."""

    done: int = 0
    failed: int = 0
    stopped: str | None = None
    timings: list[Timing] | None = None
    load: ClientLoad = field(default_factory=ClientLoad)


async def send_in_processes(
    whole: Partition, processes: int, load: ClientLoad, progress: Progress, rule: StopRule | None = None
) -> list[Timing]:
    """Send the requests of ``whole`` from up to ``processes`` processes. Returns the timings in request order.

    Adds the event-loop lags and CPU use of the processes to ``load``. Raises ``bench_failed`` if a process exits.
    """
    rule = rule or StopRule()
    partitions = split(whole, processes)
    children = [
        subprocess.Popen(child_command(_CODE), stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in partitions
    ]
    total = len(whole.requests) if whole.loop is None else 0
    latest = [Report() for _ in partitions]
    progress(0, total, 0)

    def stop() -> None:
        for child, report in zip(children, latest, strict=True):
            if report.timings is None:
                _send_to(child, None)

    async def follow(index: int) -> None:
        while latest[index].timings is None:
            latest[index] = report = await asyncio.to_thread(_receive_from, children[index])
            failed = sum(each.failed for each in latest)
            progress(sum(each.done for each in latest), total, failed)
            if report.stopped is not None:
                rule.stop(report.stopped)
            elif rule.max_errors is not None and failed >= rule.max_errors:
                rule.stop(f"{failed} requests failed (--max-errors)")

    try:
        for child, partition in zip(children, partitions, strict=True):
            await asyncio.to_thread(_send_to, child, partition)
        for child in children:
            await asyncio.to_thread(_receive_from, child)  # ready
        start = load.started = time.perf_counter() + _START_DELAY
        load.lags.clear()  # lags of this process while it started the others
        rule.on_stop = stop
        for child in children:
            _send_to(child, start)
        await asyncio.gather(*(follow(index) for index in range(len(children))))
    finally:
        for child in children:
            child.kill()
            end_child(child)
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()
    for report in latest:
        load.lags += report.load.lags
        load.cpu_share = max(load.cpu_share, report.load.cpu_share)
    return _merge(partitions, [report.timings or [] for report in latest], total)


def split(whole: Partition, processes: int) -> list[Partition]:
    """Split a load into partitions of about equal size and concurrency; conversations stay together."""
    count = min(processes, sum(request.follows is None for request in whole.requests))
    if whole.loop is not None and whole.max_concurrency is not None:
        count = min(count, whole.max_concurrency)
    partition_of: list[int] = []
    next_part = 0
    for request in whole.requests:
        if request.follows is None:
            partition_of.append(next_part % count)
            next_part += 1
        else:
            partition_of.append(partition_of[request.follows])
    partitions = []
    for part in range(count):
        indices = [index for index, own in enumerate(partition_of) if own == part]
        position = {index: number for number, index in enumerate(indices)}
        requests = [
            request if request.follows is None else replace(request, follows=position[request.follows])
            for request in (whole.requests[index] for index in indices)
        ]
        total = whole.max_concurrency
        limit = None if total is None else total // count + (part < total % count)
        offsets = [whole.offsets[index] for index in indices] if whole.loop is None else []
        own = None if whole.loop is None else replace(whole.loop, seed=whole.loop.seed + part)
        partitions.append(
            replace(whole, requests=requests, offsets=offsets, indices=indices, max_concurrency=limit, loop=own)
        )
    return partitions


def _merge(partitions: list[Partition], results: list[list[Timing]], total: int) -> list[Timing]:
    """Merge the timings of all partitions in request order; of a closed loop (``total`` 0) by scheduled time."""
    if not total:
        return sorted((timing for timings in results for timing in timings), key=lambda timing: timing.scheduled)
    pairs = [
        pair
        for partition, timings in zip(partitions, results, strict=True)
        for pair in zip(partition.indices, timings, strict=True)
    ]
    return [timing for _, timing in sorted(pairs, key=lambda pair: pair[0])]


def _send_to(child: subprocess.Popen[bytes], value: object) -> None:
    assert child.stdin is not None
    try:
        pickle.dump(value, child.stdin)
        child.stdin.flush()
    except OSError:
        raise _process_exited() from None


def _receive_from(child: subprocess.Popen[bytes]) -> Report:
    assert child.stdout is not None
    try:
        report: Report = pickle.load(child.stdout)
    except (EOFError, pickle.UnpicklingError):
        raise _process_exited() from None
    return report


def _process_exited() -> Exception:
    return error("bench_failed", failed="some", total="all", reason="a process of --client-processes exited")


# --- client process ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Read a ``Partition`` and then its start time from stdin, send it, and write ``Report`` objects to stdout.

    All messages are pickled. Any further message on stdin stops the load.
    """
    begin_child()
    partition: Partition = pickle.load(sys.stdin.buffer)
    output = sys.stdout.buffer
    _write_report(output, Report())
    _write_report(output, asyncio.run(_send(partition, sys.stdin.buffer, output)))
    os._exit(0)  # a thread still blocks on stdin


def _write_report(output: BinaryIO, report: Report) -> None:
    pickle.dump(report, output)
    output.flush()


async def _send(partition: Partition, commands: BinaryIO, output: BinaryIO) -> Report:
    async with open_client(partition.base_url, partition.api_key, partition.timeout_s) as client:
        rule = StopRule(on_overload=partition.on_overload)
        start: float = pickle.load(commands)  # of time.perf_counter, which all processes of a machine have in common
        _stop_on_command(rule, commands)
        last_report = time.monotonic()

        def progress(done: int, total: int, failed: int) -> None:
            nonlocal last_report
            if time.monotonic() - last_report > _REPORT_INTERVAL:
                last_report = time.monotonic()
                _write_report(output, Report(done, failed, rule.reason))

        common: dict[str, Any] = {"progress": progress, "start": start, "rule": rule}
        async with measure_client() as load:
            if partition.loop is None:
                everything = (partition.requests, partition.offsets, partition.max_concurrency)
                timings = await send_at(client, partition.endpoint, *everything, **common)
            else:
                requests = _source(partition, partition.loop).endless(partition.requests)
                users = partition.max_concurrency or 1
                timings = await send_for(client, partition.endpoint, requests, partition.loop.seconds, users, **common)
    failed = sum(timing.error is not None for timing in timings)
    return Report(sum(timing.ended > 0 for timing in timings), failed, rule.reason, timings, load)


def _stop_on_command(rule: StopRule, commands: BinaryIO) -> None:
    """Stop the load when another message arrives on ``commands``."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        try:
            pickle.load(commands)
        except (EOFError, OSError):
            return
        loop.call_soon_threadsafe(rule.stop, "another process ended the load")

    threading.Thread(target=wait, daemon=True).start()


def _source(partition: Partition, loop: ClosedLoop) -> RequestSource:
    """Return the source of the requests after those of ``partition``."""
    if loop.workload is None:
        return RequestSource(partition.endpoint)
    workload = open_workload(loop.workload, random.Random(loop.seed))
    return RequestSource(partition.endpoint, workload, loop.vocab_size, open_tokenizer(*loop.tokenizer), loop.adapters)
