"""Load generator: send requests at their scheduled times, and measure whether this process kept up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import httpx

from aiakq.bench.client import Endpoint, Timing, complete
from aiakq.bench.stopping import StopRule
from aiakq.bench.summary import Summary, summarize
from aiakq.bench.traffic import follow
from aiakq.bench.workload import WorkloadRequest

#: Progress callback: finished requests, total number of requests (0 if unknown), failed requests.
Progress = Callable[[int, int, int], None]

#: Seconds between samples of the event-loop lag, and the lag above which the client counts as the bottleneck.
_SAMPLE_INTERVAL, MAX_LAG = 0.01, 0.025


@dataclass
class ClientLoad:
    """Load of the client process itself during the measurement.

    lags       samples of the event-loop lag, in seconds.
    cpu_share  CPU time of the process per second of wall time; 1 is one fully used core.
    started    start of the load (``time.perf_counter``).
    """

    lags: list[float] = field(default_factory=list)
    cpu_share: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def summary(self) -> Summary:
        """Return statistics of the event-loop lag in milliseconds."""
        return summarize([1000 * lag for lag in self.lags])

    def warnings(self) -> list[str]:
        """Return a warning if the client was the bottleneck."""
        late = self.summary()["p99"]
        if late is None or late <= 1000 * MAX_LAG:
            return []
        return [
            f"The client was the bottleneck: its event loop lagged by {late:.0f} ms (p99) at {self.cpu_share:.0%} of a "
            "core. Lower the load, use --client-processes or a faster machine."
        ]


@contextlib.asynccontextmanager
async def measure_client() -> AsyncIterator[ClientLoad]:
    """Context manager that measures the event-loop lag and CPU time of this process."""
    load = ClientLoad()

    async def watch() -> None:
        while True:
            due = time.perf_counter() + _SAMPLE_INTERVAL
            await asyncio.sleep(_SAMPLE_INTERVAL)
            load.lags.append(max(0.0, time.perf_counter() - due))

    began, cpu = time.perf_counter(), time.process_time()
    task = asyncio.create_task(watch())
    try:
        yield load
    finally:
        task.cancel()
        load.cpu_share = (time.process_time() - cpu) / max(1e-9, time.perf_counter() - began)


async def send_at(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    requests: Sequence[WorkloadRequest],
    offsets: Sequence[float],
    max_concurrency: int | None,
    progress: Progress,
    start: float | None = None,
    rule: StopRule | None = None,
) -> list[Timing]:
    """Send every request at its offset (seconds) from ``start``, by default now, and wait for all responses.

    Returns the timings in the order of ``requests``. ``sent`` is 0 for requests not sent because ``rule`` stopped the
    load.
    """
    free = asyncio.Semaphore(max_concurrency or len(requests))
    start = time.perf_counter() if start is None else start
    timings = [Timing(scheduled=start + offset) for offset in offsets]
    sent = list(requests)  # as sent, i.e. with the conversation so far
    answered = [asyncio.Event() for _ in requests]
    rule = rule or StopRule()
    done = failed = 0
    progress(0, len(requests), 0)

    async def send(index: int) -> None:
        nonlocal done, failed
        request, timing = requests[index], timings[index]
        if request.follows is not None:
            await answered[request.follows].wait()
            before = timings[request.follows]
            timing.scheduled = max(timing.scheduled, before.ended)
            sent[index] = request = follow(request, sent[request.follows], before.text, endpoint.is_chat)
        # Sleep until an absolute time, so that delays do not accumulate and lower the rate.
        await asyncio.sleep(max(0.0, timing.scheduled - time.perf_counter()))
        rule.due(time.perf_counter() - start)
        async with free:
            await complete(client, endpoint, request, timing)
        answered[index].set()
        done += 1
        failed += timing.error is not None
        rule.ended(timing.ended - start, timing.ended - timing.sent, timing.error is not None)
        progress(done, len(requests), failed)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(index)) for index in range(len(requests))]

        def stop() -> None:
            for task, timing in zip(tasks, timings, strict=True):
                if not timing.sent:
                    task.cancel()

        rule.on_stop = stop
        if rule.reason is not None:
            stop()
    return timings


async def send_for(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    requests: Iterator[WorkloadRequest],
    seconds: float,
    concurrency: int,
    progress: Progress,
    start: float | None = None,
    rule: StopRule | None = None,
) -> list[Timing]:
    """Keep ``concurrency`` requests in flight for ``seconds`` from ``start``, and wait for the last responses.

    Each of the concurrent users sends at least one request.
    """
    start = time.perf_counter() if start is None else start
    rule = rule or StopRule()
    timings: list[Timing] = []
    done = failed = 0

    async def user() -> None:
        nonlocal done, failed
        await asyncio.sleep(max(0.0, start - time.perf_counter()))
        while True:
            timing = Timing(scheduled=time.perf_counter())
            timings.append(timing)
            await complete(client, endpoint, next(requests), timing)
            done += 1
            failed += timing.error is not None
            rule.ended(timing.ended - start, timing.ended - timing.sent, timing.error is not None)
            progress(done, 0, failed)
            if time.perf_counter() >= start + seconds or rule.reason is not None:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(user())
    return timings
