"""Several processes that send requests at once, for loads that one event loop cannot keep up with."""

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
from aiakq.bench.load import ClientLoad, Progress, send_at, send_for, watched
from aiakq.bench.local_tokenizer import open_tokenizer
from aiakq.bench.request_source import RequestSource
from aiakq.bench.stopping import StopRule
from aiakq.bench.workload import Request, open_workload
from aiakq.errors import error
from aiakq.system.processes import begin_child, child_command, end_child

#: Seconds between the moment at which all processes are ready and the first request; and between two reports.
_START_IN, _REPORT_EVERY = 0.1, 0.2
_CODE = "from aiakq.bench.client_processes import main; main()"


@dataclass(frozen=True)
class ClosedLoop:
    """A number of requests kept in flight for ``seconds``.

    workload    options of a workload that makes new prompts; None: the share's own requests are repeated.
    tokenizer   folders whose tokenizer turns token ids into text for chat: the one given, and the server's.
    adapters    as of ``RequestSource``.
    """

    seconds: float
    seed: int
    workload: WorkloadArguments | None = None
    vocab_size: int | None = None
    tokenizer: tuple[str | None, str | None] = (None, None)
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Share:
    """What one process sends, and to where. ``indices`` are those of its requests among all.

    loop  None: every request is sent once, at its offset.
    """

    base_url: str
    api_key: str | None
    timeout_s: float
    endpoint: Endpoint
    requests: list[Request]
    offsets: list[float]
    indices: list[int]
    max_concurrency: int | None
    on_overload: bool = False
    loop: ClosedLoop | None = None


@dataclass
class Report:
    """What a process says: that it is ready, how far it is, and in the end its timings."""

    done: int = 0
    failed: int = 0
    stopped: str | None = None
    timings: list[Timing] | None = None
    load: ClientLoad = field(default_factory=ClientLoad)


async def send_in_processes(
    whole: Share, processes: int, load: ClientLoad, progress: Progress, rule: StopRule | None = None
) -> list[Timing]:
    """Divide the requests of ``whole`` among so many processes, send them, and return all timings in order.

    ``load`` gets what the processes say of themselves. Raises ``bench_failed`` if one of them ends.
    """
    rule = rule or StopRule()
    shares = divide(whole, processes)
    children = [subprocess.Popen(child_command(_CODE), stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in shares]
    total = len(whole.requests) if whole.loop is None else 0
    latest = [Report() for _ in shares]
    progress(0, total, 0)

    def stop() -> None:
        for child, report in zip(children, latest, strict=True):
            if report.timings is None:
                _put(child, None)

    async def follow(index: int) -> None:
        while latest[index].timings is None:
            latest[index] = report = await asyncio.to_thread(_take, children[index])
            failed = sum(each.failed for each in latest)
            progress(sum(each.done for each in latest), total, failed)
            if report.stopped is not None:
                rule.stop(report.stopped)
            elif rule.max_errors is not None and failed >= rule.max_errors:
                rule.stop(f"{failed} requests failed (--max-errors)")

    try:
        for child, share in zip(children, shares, strict=True):
            await asyncio.to_thread(_put, child, share)
        for child in children:
            await asyncio.to_thread(_take, child)  # it is ready
        start = load.started = time.perf_counter() + _START_IN
        load.lags.clear()  # of this process, while it started the others
        rule.on_stop = stop
        for child in children:
            _put(child, start)
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
    return _in_order(shares, [report.timings or [] for report in latest], total)


def divide(whole: Share, processes: int) -> list[Share]:
    """Parts of about the same size; conversations stay together. Each may have its part of the requests in flight."""
    count = min(processes, sum(request.follows is None for request in whole.requests))
    if whole.loop is not None and whole.max_concurrency is not None:
        count = min(count, whole.max_concurrency)
    part_of: list[int] = []
    next_part = 0
    for request in whole.requests:
        if request.follows is None:
            part_of.append(next_part % count)
            next_part += 1
        else:
            part_of.append(part_of[request.follows])
    shares = []
    for part in range(count):
        indices = [index for index, own in enumerate(part_of) if own == part]
        place = {index: number for number, index in enumerate(indices)}
        requests = [
            request if request.follows is None else replace(request, follows=place[request.follows])
            for request in (whole.requests[index] for index in indices)
        ]
        total = whole.max_concurrency
        limit = None if total is None else total // count + (part < total % count)
        offsets = [whole.offsets[index] for index in indices] if whole.loop is None else []
        own = None if whole.loop is None else replace(whole.loop, seed=whole.loop.seed + part)
        shares.append(
            replace(whole, requests=requests, offsets=offsets, indices=indices, max_concurrency=limit, loop=own)
        )
    return shares


def _in_order(shares: list[Share], found: list[list[Timing]], total: int) -> list[Timing]:
    """The timings of all shares, in the order of the requests; of a closed loop by their time."""
    if not total:
        return sorted((timing for timings in found for timing in timings), key=lambda timing: timing.scheduled)
    pairs = [
        pair for share, timings in zip(shares, found, strict=True) for pair in zip(share.indices, timings, strict=True)
    ]
    return [timing for _, timing in sorted(pairs, key=lambda pair: pair[0])]


def _put(child: subprocess.Popen[bytes], value: object) -> None:
    assert child.stdin is not None
    try:
        pickle.dump(value, child.stdin)
        child.stdin.flush()
    except OSError:
        raise _ended() from None


def _take(child: subprocess.Popen[bytes]) -> Report:
    assert child.stdout is not None
    try:
        found: Report = pickle.load(child.stdout)
    except (EOFError, pickle.UnpicklingError):
        raise _ended() from None
    return found


def _ended() -> Exception:
    return error("bench_failed", failed="some", total="all", reason="a process of --client-processes ended")


# --- in the process ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Send the share that comes in on stdin, from the moment that follows it; reports go to stdout."""
    begin_child()
    share: Share = pickle.load(sys.stdin.buffer)
    answers = sys.stdout.buffer
    _say(answers, Report())
    _say(answers, asyncio.run(_send(share, sys.stdin.buffer, answers)))
    os._exit(0)  # a thread waits for orders


def _say(answers: BinaryIO, report: Report) -> None:
    pickle.dump(report, answers)
    answers.flush()


async def _send(share: Share, orders: BinaryIO, answers: BinaryIO) -> Report:
    async with open_client(share.base_url, share.api_key, share.timeout_s) as client:
        rule = StopRule(on_overload=share.on_overload)
        start: float = pickle.load(orders)  # of the clock that all processes of a machine share
        _stop_when_told(rule, orders)
        told = time.monotonic()

        def progress(done: int, total: int, failed: int) -> None:
            nonlocal told
            if time.monotonic() - told > _REPORT_EVERY:
                told = time.monotonic()
                _say(answers, Report(done, failed, rule.reason))

        common: dict[str, Any] = {"progress": progress, "start": start, "rule": rule}
        async with watched() as load:
            if share.loop is None:
                everything = (share.requests, share.offsets, share.max_concurrency)
                timings = await send_at(client, share.endpoint, *everything, **common)
            else:
                requests = _source(share, share.loop).endless(share.requests)
                users = share.max_concurrency or 1
                timings = await send_for(client, share.endpoint, requests, share.loop.seconds, users, **common)
    failed = sum(timing.error is not None for timing in timings)
    return Report(sum(timing.ended > 0 for timing in timings), failed, rule.reason, timings, load)


def _stop_when_told(rule: StopRule, orders: BinaryIO) -> None:
    """End the load when something more comes in on ``orders``."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        try:
            pickle.load(orders)
        except (EOFError, OSError):
            return
        loop.call_soon_threadsafe(rule.stop, "another process ended the load")

    threading.Thread(target=wait, daemon=True).start()


def _source(share: Share, loop: ClosedLoop) -> RequestSource:
    """What follows the requests that the share holds."""
    if loop.workload is None:
        return RequestSource(share.endpoint)
    workload = open_workload(loop.workload, random.Random(loop.seed))
    return RequestSource(share.endpoint, workload, loop.vocab_size, open_tokenizer(*loop.tokenizer), loop.adapters)
