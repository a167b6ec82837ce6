"""Send requests from several client processes, for loads that one event loop cannot sustain."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from aiakq.arguments.bench import WorkloadArguments
from aiakq.bench.client import Endpoint, Timing, open_client
from aiakq.bench.load import ClientLoad, Progress, measure_client, send_at, send_for
from aiakq.bench.local_tokenizer import open_tokenizer
from aiakq.bench.request_source import RequestSource
from aiakq.bench.stopping import StopRule
from aiakq.bench.workload import WorkloadRequest, open_workload
from aiakq.errors import AiakqError, error
from aiakq.system.async_channel import AsyncChannel
from aiakq.system.channel import Channel, Disconnected
from aiakq.system.child import Child, begin_child, child_command, exit_child, parent_socket, run_for_parent

#: Seconds from when all processes are ready to the first request, and between progress reports of a process.
_START_DELAY, _REPORT_INTERVAL = 0.1, 0.2
#: Seconds to wait for the exit of a process that has closed its socket.
_EXIT_SECONDS = 5.0
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


class Partition(msgspec.Struct, tag="partition", frozen=True):
    """The first message to a client process: the requests that it sends, and the server it sends them to.

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


class StartAt(msgspec.Struct, tag="start"):
    """When the load starts (``time.perf_counter``, which all processes of a machine have in common).

    Any message after it ends the load early.
    """

    time: float


class Report(msgspec.Struct, tag="report"):
    """Message from a client process: an empty one when it is ready, its progress, and finally its timings."""

    done: int = 0
    failed: int = 0
    stopped: str | None = None
    timings: list[Timing] | None = None
    load: ClientLoad = msgspec.field(default_factory=ClientLoad)


_ParentChannel = AsyncChannel[Partition | StartAt, Report]
_ClientChannel = Channel[Report, Partition | StartAt]


@dataclass
class _Client:
    """One client process, and its latest report."""

    child: Child
    channel: _ParentChannel
    latest: Report

    async def receive(self) -> Report:
        """Receive the next report. Raises ``bench_failed`` if the process exits."""
        report = await self.channel.receive()
        if report is None:
            await self.child.exited(_EXIT_SECONDS)
            raise _failed(self.child.exit_reason(0))
        self.latest = report
        return report


async def send_in_processes(
    whole: Partition, processes: int, load: ClientLoad, progress: Progress, rule: StopRule | None = None
) -> list[Timing]:
    """Send the requests of ``whole`` from up to ``processes`` processes. Returns the timings in request order.

    Adds the event-loop lags and CPU use of the processes to ``load``. Raises ``bench_failed`` if a process exits.
    """
    rule = rule or StopRule()
    partitions = split(whole, processes)
    total = len(whole.requests) if whole.loop is None else 0
    clients: list[_Client] = []
    progress(0, total, 0)

    def stop() -> None:
        for client in clients:
            client.channel.send(StartAt(0.0))

    async def follow(client: _Client) -> None:
        while client.latest.timings is None:
            report = await client.receive()
            failed = sum(each.latest.failed for each in clients)
            progress(sum(each.latest.done for each in clients), total, failed)
            if report.stopped is not None:
                rule.stop(report.stopped)
            elif rule.max_errors is not None and failed >= rule.max_errors:
                rule.stop(f"{failed} requests failed (--max-errors)")

    try:
        for partition in partitions:
            child = Child(child_command(_CODE))
            clients.append(_Client(child, await _ParentChannel.open(child.sockets[0], Report), Report()))
            clients[-1].channel.send(partition)
        for client in clients:
            await client.receive()  # ready
        start = load.started = time.perf_counter() + _START_DELAY
        load.lags.clear()  # lags of this process while it started the others
        rule.on_stop = stop
        for client in clients:
            client.channel.send(StartAt(start))
        await asyncio.gather(*map(follow, clients))
    finally:
        for client in clients:
            client.child.kill()
            client.child.end()
            client.channel.close()
    for client in clients:
        load.lags += client.latest.load.lags
        load.cpu_share = max(load.cpu_share, client.latest.load.cpu_share)
    return _merge(partitions, [client.latest.timings or [] for client in clients], total)


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
            request if request.follows is None else dataclasses.replace(request, follows=position[request.follows])
            for request in (whole.requests[index] for index in indices)
        ]
        total = whole.max_concurrency
        limit = None if total is None else total // count + (part < total % count)
        offsets = [whole.offsets[index] for index in indices] if whole.loop is None else []
        own = None if whole.loop is None else dataclasses.replace(whole.loop, seed=whole.loop.seed + part)
        partitions.append(
            msgspec.structs.replace(
                whole, requests=requests, offsets=offsets, indices=indices, max_concurrency=limit, loop=own
            )
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


def _failed(reason: str) -> AiakqError:
    return error("bench_failed", failed="some", total="all", reason=f"a process of --client-processes exited: {reason}")


# --- client process ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Receive a ``Partition`` and its start time, send it, and report; the entry point of the process."""
    begin_child()
    channel = _ClientChannel(parent_socket(), Partition | StartAt)

    def work(partition: Partition) -> None:
        channel.send(Report())
        channel.send(asyncio.run(_send(partition, channel)))

    exit_child(run_for_parent(channel, Partition, work, lambda partition, reason: _failed(reason)))


async def _send(partition: Partition, channel: _ClientChannel) -> Report:
    async with open_client(partition.base_url, partition.api_key, partition.timeout_s) as client:
        rule = StopRule(on_overload=partition.on_overload)
        start = channel.receive()
        if not isinstance(start, StartAt):
            raise Disconnected
        _stop_on_command(rule, channel)
        last_report = time.monotonic()

        def progress(done: int, total: int, failed: int) -> None:
            nonlocal last_report
            if time.monotonic() - last_report > _REPORT_INTERVAL:
                last_report = time.monotonic()
                channel.send(Report(done, failed, rule.reason))

        common: dict[str, Any] = {"progress": progress, "start": start.time, "rule": rule}
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


def _stop_on_command(rule: StopRule, channel: _ClientChannel) -> None:
    """Stop the load when another message arrives."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        if channel.receive() is not None:
            loop.call_soon_threadsafe(rule.stop, "another process ended the load")

    threading.Thread(target=wait, daemon=True).start()


def _source(partition: Partition, loop: ClosedLoop) -> RequestSource:
    """Return the source of the requests after those of ``partition``."""
    if loop.workload is None:
        return RequestSource(partition.endpoint)
    workload = open_workload(loop.workload, random.Random(loop.seed))
    return RequestSource(partition.endpoint, workload, loop.vocab_size, open_tokenizer(*loop.tokenizer), loop.adapters)
