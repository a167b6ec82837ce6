"""Requests whose adapter's files are being replaced are answered by the next version as a whole, or fail in time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from aiakq.errors import AiakqError, error
from aiakq.runtime.engine.adapters import AdapterRef
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.api.adapters import AdapterRegistry
from aiakq.server.process.lost_adapters import REPLACEMENT_SECONDS, LostAdapters
from aiakq.server.process.request_stream import Prompt, RequestStream

OLD, NEW = (AdapterRef(key, "sql", f"/{key}", 1) for key in ("old", "new"))
LATER = REPLACEMENT_SECONDS + 1


def lost(root: str | None = "/") -> tuple[LostAdapters, AdapterRegistry, list[RequestStream]]:
    """Lost adapters, the registry with the old version of one, and the requests that were restarted."""
    restarted: list[RequestStream] = []
    kept, registry = LostAdapters(restarted.append), AdapterRegistry(root, {"sql": OLD}, {"sql": "base"})
    kept.versions = registry
    return kept, registry, restarted


def request() -> RequestStream:
    """A request of the old version."""
    params, nothing = SamplingParams(), lambda stream: None
    return RequestStream("r", [Prompt(None, [1])], params, time.monotonic(), nothing, adapter=OLD)


def replace(registry: AdapterRegistry) -> None:
    registry._adapters["sql"] = NEW


def test_a_request_waits_for_the_next_version_and_then_has_that():
    kept, registry, restarted = lost()
    stream = request()
    assert kept.keeps(stream)
    kept.add(stream, error("adapter_lost", reason="gone"))
    kept.update(time.monotonic())
    assert not restarted and stream.failure is None
    replace(registry)
    kept.update(time.monotonic())
    assert restarted == [stream] and stream.adapter == NEW
    kept.update(time.monotonic() + LATER)
    assert restarted == [stream] and stream.failure is None


@pytest.mark.parametrize("root", ["/", None])
def test_a_request_is_restarted_at_once_if_its_adapter_has_been_replaced(root):
    kept, registry, restarted = lost(root)
    replace(registry)
    stream = request()
    assert kept.keeps(stream)
    kept.add(stream, error("adapter_lost", reason="gone"))
    assert restarted == [stream] and stream.adapter == NEW


@pytest.mark.parametrize("removed", [False, True])
def test_a_request_fails_if_no_other_version_is_loaded_in_time(removed):
    kept, registry, restarted = lost()
    stream = request()
    kept.add(stream, error("adapter_lost", reason="gone"))
    if removed:
        registry.remove("sql")
    kept.update(time.monotonic() + (0 if removed else LATER))
    assert not restarted and stream.failure.id == "adapter_lost"


def test_a_request_waits_for_a_load_that_takes_long():
    kept, registry, restarted = lost()
    stream = request()
    kept.add(stream, error("adapter_lost", reason="gone"))

    async def check(name: str, path: str, root: str | None) -> AdapterRef:
        kept.update(time.monotonic() + LATER)
        return NEW

    async def prefetch(adapter: AdapterRef) -> None:
        kept.update(time.monotonic() + LATER)

    asyncio.run(registry.load("sql", "new", ["base"], check, prefetch, replace=True))
    assert stream.failure is None and not registry.is_loading("sql")
    kept.update(time.monotonic() + LATER)
    assert restarted == [stream] and stream.adapter == NEW


def test_a_failed_load_ends_the_wait():
    kept, registry, _ = lost()

    async def check(name: str, path: str, root: str | None) -> AdapterRef:
        raise error("adapter_missing", path=path)

    with pytest.raises(AiakqError):
        asyncio.run(registry.load("sql", "new", ["base"], check, None, replace=True))  # type: ignore[arg-type]
    assert not registry.is_loading("sql") and not registry._loading
    stream = request()
    kept.add(stream, error("adapter_lost", reason="gone"))
    kept.update(time.monotonic() + LATER)
    assert stream.failure.id == "adapter_lost"


def test_no_request_waits_that_cannot_be_answered_by_another_version():
    """A part of its output was read, no other version can be loaded, or it has no adapter."""
    kept, _, _ = lost(root=None)
    assert not kept.keeps(request())
    kept, registry, _ = lost()
    consumed = request()
    consumed.consumed = True
    assert not kept.keeps(consumed)
    registry.remove("sql")
    assert not kept.keeps(request())
    other: Any = request()
    other.adapter = None
    assert not kept.keeps(other)


def test_a_closed_request_is_not_restarted():
    kept, registry, restarted = lost()
    stream = request()
    kept.add(stream, error("adapter_lost", reason="gone"))
    kept.discard(stream)
    replace(registry)
    kept.update(time.monotonic() + LATER)
    assert not restarted and stream.failure is None


def test_a_request_that_is_restarted_on_its_engine_has_new_ids_and_no_output():
    stream = request()
    before = stream.prompt_ids
    stream.put(0, Delta("r", 0, "text", [1], ""))
    stream.restart(with_new_ids=True)
    assert stream.prompt_ids != before and not stream._unread and stream.restarting
