"""Periodic tasks of a running server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from aiakq.server import periodic
from aiakq.server.http.body_budget import BodyBudget


def test_memory_is_returned_when_large_bodies_are_gone(monkeypatch):
    """Once per burst, and not while a request is running."""
    released: list[int] = []
    monkeypatch.setattr(periodic, "RELEASE_SECONDS", 0.01)
    monkeypatch.setattr(periodic, "release_host_memory", lambda: released.append(1))
    state: Any = SimpleNamespace(num_in_flight=1)
    budget = BodyBudget(SimpleNamespace(), 1 << 30)  # type: ignore[arg-type]

    async def run() -> None:
        task = asyncio.create_task(periodic.release_memory(state, budget))
        budget.reserve("a", periodic.RELEASE_ABOVE_BYTES + 1)
        await asyncio.sleep(0.1)
        assert not released, "it is in use"
        budget.num_bytes = 0
        await asyncio.sleep(0.1)
        assert not released, "a request is running"
        state.num_in_flight = 0
        await asyncio.sleep(0.2)
        assert len(released) == 1
        budget.reserve("a", 1000, False)
        budget.num_bytes = 0
        await asyncio.sleep(0.1)
        assert len(released) == 1, "small bodies do not matter"
        task.cancel()

    asyncio.run(run())


def test_free_pages_of_the_heap_are_returned_at_intervals(monkeypatch):
    """Also while requests run: a busy server is never without one."""
    trimmed: list[int] = []
    monkeypatch.setattr(periodic, "TRIM_SECONDS", 0.01)
    monkeypatch.setattr(periodic, "trim_heap", lambda: trimmed.append(1))

    async def run() -> None:
        task = asyncio.create_task(periodic.trim_memory())
        async with asyncio.timeout(10):
            while len(trimmed) < 3:
                await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(run())
