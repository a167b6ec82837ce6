"""Several processes that send requests at once, for loads that one event loop cannot keep up with."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import BinaryIO

from aiakq.bench.client import Endpoint, Timing, open_client
from aiakq.bench.load import ClientLoad, Progress, send_at, watched
from aiakq.bench.workload import Request
from aiakq.errors import error
from aiakq.system.processes import begin_child, child_command, end_child

#: Seconds between the moment at which all processes are ready and the first request.
_START_IN = 0.1
_CODE = "from aiakq.bench.client_processes import main; main()"


@dataclass(frozen=True)
class Share:
    """What one process sends, and to where. ``indices`` are those of its requests among all."""

    base_url: str
    api_key: str | None
    timeout_s: float
    endpoint: Endpoint
    requests: list[Request]
    offsets: list[float]
    indices: list[int]
    max_concurrency: int | None


async def send_in_processes(whole: Share, processes: int, load: ClientLoad, progress: Progress) -> list[Timing]:
    """Divide the requests of ``whole`` among so many processes, send them, and return all timings in order.

    ``load`` gets what the processes say of themselves. Raises ``bench_failed`` if one of them ends.
    """
    shares = divide(whole, processes)
    children = [subprocess.Popen(child_command(_CODE), stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in shares]
    timings: list[Timing | None] = [None] * len(whole.requests)
    done = failed = 0
    progress(0, len(timings), 0)
    try:
        for child, share in zip(children, shares, strict=True):
            await asyncio.to_thread(_put, child, share)
        for child in children:
            await asyncio.to_thread(_take, child)  # it is ready
        start = load.started = time.perf_counter() + _START_IN
        load.lags.clear()  # of this process, while it started the others
        for child in children:
            _put(child, start)
        for result in asyncio.as_completed(
            [_result(child, share) for child, share in zip(children, shares, strict=True)]
        ):
            share, found, own = await result
            for index, timing in zip(share.indices, found, strict=True):
                timings[index] = timing
            load.lags += own.lags
            load.cpu_share = max(load.cpu_share, own.cpu_share)
            done, failed = done + len(found), failed + sum(timing.error is not None for timing in found)
            progress(done, len(timings), failed)
    finally:
        for child in children:
            child.kill()
            end_child(child)
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()
    return [timing for timing in timings if timing is not None]


def divide(whole: Share, processes: int) -> list[Share]:
    """Parts of about the same size; conversations stay together. Each may have its part of the requests in flight."""
    count = min(processes, sum(request.follows is None for request in whole.requests))
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
        most = whole.max_concurrency
        limit = None if most is None else most // count + (part < most % count)
        offsets = [whole.offsets[index] for index in indices]
        shares.append(replace(whole, requests=requests, offsets=offsets, indices=indices, max_concurrency=limit))
    return shares


async def _result(child: subprocess.Popen[bytes], share: Share) -> tuple[Share, list[Timing], ClientLoad]:
    timings, load = await asyncio.to_thread(_take, child)
    return share, timings, load


def _put(child: subprocess.Popen[bytes], value: object) -> None:
    assert child.stdin is not None
    try:
        pickle.dump(value, child.stdin)
        child.stdin.flush()
    except OSError:
        raise _ended() from None


def _take(child: subprocess.Popen[bytes]) -> tuple[list[Timing], ClientLoad]:
    assert child.stdout is not None
    try:
        found: tuple[list[Timing], ClientLoad] = pickle.load(child.stdout)
    except (EOFError, pickle.UnpicklingError):
        raise _ended() from None
    return found


def _ended() -> Exception:
    return error("bench_failed", failed="some", total="all", reason="a process of --client-processes ended")


# --- in the process ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Send the share that comes in on stdin, from the moment that follows it; the timings go to stdout."""
    begin_child()
    share: Share = pickle.load(sys.stdin.buffer)
    pickle.dump(([], ClientLoad()), sys.stdout.buffer)
    sys.stdout.buffer.flush()
    pickle.dump(asyncio.run(_send(share, sys.stdin.buffer)), sys.stdout.buffer)
    sys.stdout.buffer.flush()


async def _send(share: Share, orders: BinaryIO) -> tuple[list[Timing], ClientLoad]:
    async with open_client(share.base_url, share.api_key, share.timeout_s) as client:
        start: float = pickle.load(orders)  # of the clock that all processes of a machine share
        async with watched() as load:
            timings = await send_at(
                client,
                share.endpoint,
                share.requests,
                share.offsets,
                share.max_concurrency,
                lambda *known: None,
                start,
            )
    return timings, load
