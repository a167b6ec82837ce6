"""Requests whose adapter's files are being replaced are answered by the next version as a whole, or fail in time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.command import Abort
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import StepOutput, TokenOutput
from aiakq.runtime.protocol.request import Prompt, Request, RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import ADAPTER_FAILED
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.api.adapters import AdapterRegistry
from aiakq.server.process.ipc import Submit
from aiakq.server.process.lost_adapters import REPLACEMENT_SECONDS, LostAdapters
from aiakq.server.process.request_manager import QueueLimits, RequestManager
from aiakq.server.process.request_stream import RequestStream
from aiakq.server.telemetry.metrics import Metrics

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
    asked = Request("r", [Prompt(None, [1])], SamplingParams(), RequestOptions(adapter=OLD), time.monotonic())
    return RequestStream(asked, lambda stream: None)


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
    assert restarted == [stream] and stream.request.options.adapter == NEW
    kept.update(time.monotonic() + LATER)
    assert restarted == [stream] and stream.failure is None


@pytest.mark.parametrize("root", ["/", None])
def test_a_request_is_restarted_at_once_if_its_adapter_has_been_replaced(root):
    kept, registry, restarted = lost(root)
    replace(registry)
    stream = request()
    assert kept.keeps(stream)
    kept.add(stream, error("adapter_lost", reason="gone"))
    assert restarted == [stream] and stream.request.options.adapter == NEW


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
    assert restarted == [stream] and stream.request.options.adapter == NEW


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


class Processor:
    """The output processor that a manager uses: every request has two sequences."""

    def __init__(self) -> None:
        self.limits: Any = None
        self.ids: dict[str, list[str]] = {}
        self.adapters: list[AdapterRef] = []

    def add(self, prompt_id: str, prompt: Prompt, request: Request, key: str) -> list[Any]:
        self.ids[prompt_id] = [f"{prompt_id}-{index}" for index in range(2)]
        self.adapters.append(request.options.adapter)
        ids, params, options = self.ids[prompt_id], request.params, request.options
        return [RequestSpec(id, prompt.token_ids, params, 5, 0, options=options) for id in ids]

    def cancel(self, prompt_id: str) -> list[str]:
        return self.ids.pop(prompt_id, [])

    def process(self, output: TokenOutput) -> tuple[list[Delta], list[str]]:
        prompt_id, _, index = output.request_id.rpartition("-")
        found = output.request_id in self.ids.get(prompt_id, [])
        delta = Delta(prompt_id, int(index), "", output.token_ids, finish_reason=output.finish_reason)
        delta.error = output.error
        return [delta] if found else [], []


def managed() -> tuple[RequestManager, Processor, AdapterRegistry, list[Any], RequestStream]:
    """A manager with a request of the old version, of which the engine has run one sequence."""
    registry, processor, sent = AdapterRegistry("/", {"sql": OLD}, {"sql": "base"}), Processor(), list[Any]()
    metrics = Metrics("base", 100, {"block_size": "16"})
    limits, queue = ModelLimits(100, 200, 300), QueueLimits(4, 4, 100, 60, 60)
    manager = RequestManager(processor, limits, metrics.of_engine(0), queue)  # type: ignore[arg-type]
    manager.use_adapters(registry)
    manager.on_engine_ready(sent.append, limits)
    options, prompts = RequestOptions(adapter=OLD), [Prompt(None, [1])]
    stream = manager.start(Request("r", prompts, SamplingParams(n=2), options, time.monotonic(), final_only=True))
    first, _ = processor.ids[stream.prompt_ids[0]]
    manager.on_start([first])
    manager.on_step(StepOutput([TokenOutput(first, [7], finish_reason="length")]))
    return manager, processor, registry, sent, stream


def lose(manager: RequestManager, stream: RequestStream) -> str:
    """Fail the second sequence; returns its id."""
    second = f"{stream.prompt_ids[0]}-1"
    failed = TokenOutput(second, finish_reason="error", error=f"{ADAPTER_FAILED}: its files have changed.")
    manager.on_step(StepOutput([failed]))
    return second


def test_all_sequences_of_a_request_begin_again_with_the_next_version():
    manager, processor, registry, sent, stream = managed()
    before = lose(manager, stream)
    assert isinstance(sent[-1], Abort) and before in sent[-1].request_ids and manager.num_unfinished == 0
    replace(registry)
    manager.expire(time.monotonic())
    assert isinstance(sent[-1], Submit) and processor.adapters == [OLD, NEW] and manager.num_unfinished == 2
    manager.on_step(StepOutput([TokenOutput(before, finish_reason="abort")]))  # outputs of the old sequences
    ids = processor.ids[stream.prompt_ids[0]]
    manager.on_step(StepOutput([TokenOutput(id, [8], finish_reason="length") for id in ids]))
    assert stream.failure is None and [delta.token_ids for delta in stream._unread.values()] == [[8], [8]]
    assert manager.num_unfinished == 0 and stream.is_complete


def test_a_request_that_waits_for_its_adapter_is_restarted_by_a_new_engine():
    manager, processor, registry, sent, stream = managed()
    lose(manager, stream)
    ended = error("engine_dead", reason="it was killed")
    manager.on_engine_end(ended, ended, replay=True)
    replace(registry)
    manager.expire(time.monotonic())
    assert stream.failure is None and processor.adapters == [OLD]
    manager.on_engine_ready(sent.append, ModelLimits(100, 200, 300))
    assert isinstance(sent[-1], Submit) and manager.num_unfinished == 2 and len(processor.adapters) == 2
    lose(manager, stream)
    assert processor.adapters == [OLD, OLD, NEW] and manager.num_unfinished == 2


def test_a_request_that_is_closed_while_it_waits_leaves_nothing_behind():
    manager, processor, registry, sent, stream = managed()
    lose(manager, stream)
    stream.close()
    replace(registry)
    manager.expire(time.monotonic())
    assert processor.adapters == [OLD] and not manager._streams and manager.num_unfinished == 0
    assert not manager._lost._waiting and manager.num_waiting_tokens == 0
