"""Periodic tasks of a running server: request timeouts and the statistics line."""

from __future__ import annotations

import asyncio
import time

from aiakq.server.api.service import ServerState
from aiakq.server.http.body_budget import BodyBudget
from aiakq.server.process.replicas import Requests
from aiakq.server.telemetry.events import OnEvent, ServerEvent
from aiakq.system.memory import release_host_memory, trim_heap

STATS_SECONDS = 10.0
#: Interval in seconds, and peak size of request bodies in bytes, after which freed memory is returned.
RELEASE_SECONDS, RELEASE_ABOVE_BYTES = 2.0, 8 << 20
#: Seconds between two releases of the heap's free pages, which take a fraction of a millisecond.
TRIM_SECONDS = 20.0


async def expire_requests(manager: Requests) -> None:
    """Twice per second, fail requests that have waited or run for too long."""
    while True:
        await asyncio.sleep(0.5)
        manager.expire(time.monotonic())


async def release_memory(state: ServerState, budget: BodyBudget) -> None:
    """Return memory to the system after large request bodies have been freed, while nothing is running."""
    while True:
        await asyncio.sleep(RELEASE_SECONDS)
        if not (budget.num_bytes or state.num_in_flight) and budget.take_max_used() > RELEASE_ABOVE_BYTES:
            await asyncio.to_thread(release_host_memory)


async def trim_memory() -> None:
    """Return free pages of the heap to the system at intervals, also while requests run.

    Buffers of all sizes come and go with requests and leave holes, which glibc keeps: without this, the process grows
    by megabytes in ten thousand requests.
    """
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        await asyncio.to_thread(trim_heap)


async def report_stats(state: ServerState, on_event: OnEvent) -> None:
    """Report a line of statistics every ten seconds if tokens were generated."""
    while True:
        before = _counters(state.manager)
        await asyncio.sleep(STATS_SECONDS)
        after = _counters(state.manager)
        prompt, output, queries, hits = (new - old for new, old in zip(after, before, strict=True))
        if not (prompt or output or state.num_in_flight):
            continue
        stats = state.manager.stats
        text = (
            f"running {stats.num_running}, waiting {stats.num_waiting}, "
            f"prompt {prompt / STATS_SECONDS:.1f} tokens/s, output {output / STATS_SECONDS:.1f} tokens/s, "
            f"KV pages {stats.kv_usage:.1%} used, prefix cache {hits / queries if queries else 0.0:.1%} hits"
        )
        on_event(ServerEvent("stats", text))


def _counters(manager: Requests) -> tuple[int, int, int, int]:
    """Return the numbers of prompt tokens, generated tokens, prefix cache queries and hits since the start."""
    stats = manager.stats
    return manager.num_prompt_tokens, manager.num_generation_tokens, stats.prefix_queries, stats.prefix_hits
