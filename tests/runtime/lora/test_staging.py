"""Adapters that are prepared before they are loaded: how many, in which order, and what becomes of failures."""

from __future__ import annotations

import threading

import pytest

from aiakq.errors import AiakqError, error
from aiakq.runtime.engine.adapters import AdapterRef
from aiakq.runtime.lora.staging import AdapterStaging


def ref(key: str, nbytes: int = 10) -> AdapterRef:
    return AdapterRef(key, f"name of {key}", f"/adapters/{key}", nbytes)


class Reader:
    """Prepares adapters once they may pass."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.read: list[str] = []
        self.passes = threading.Event()
        self.failure = failure

    def __call__(self, adapter: AdapterRef) -> str:
        self.read.append(adapter.key)
        assert self.passes.wait(60)
        if self.failure is not None:
            raise self.failure
        return f"prepared {adapter.key}"


def test_an_adapter_is_prepared_once_in_another_thread_and_taken_once():
    reader = Reader()
    staging = AdapterStaging(reader, 2, None)
    ready = staging.add(ref("a"))
    assert staging.add(ref("a")) is ready and not ready.done()
    reader.passes.set()
    ready.result(60)
    assert staging.take("a") == "prepared a" and reader.read == ["a"]
    assert staging.take("a") is None and staging.keys == []


def test_taking_waits_for_the_thread():
    reader = Reader()
    staging = AdapterStaging(reader, 2, None)
    staging.add(ref("a"))
    threading.Timer(0.01, reader.passes.set).start()
    assert staging.take("a") == "prepared a"


@pytest.mark.parametrize(("max_adapters", "max_bytes"), [(2, None), (9, 25)])
def test_further_adapters_start_in_order_when_others_leave(max_adapters, max_bytes):
    reader = Reader()
    reader.passes.set()
    staging = AdapterStaging(reader, max_adapters, max_bytes)
    futures = {key: staging.add(ref(key)) for key in "abcde"}
    futures["b"].result(60)
    assert staging.keys == ["a", "b"] and reader.read == ["a", "b"] and not futures["c"].done()
    staging.take("b")
    futures["c"].result(60)
    staging.drop("a")
    futures["d"].result(60)
    assert staging.keys == ["c", "d"] and not futures["e"].done()
    assert staging.take("e") is None, "a step that needs it now reads it itself"
    assert futures["e"].done() and reader.read == ["a", "b", "c", "d"]


def test_an_adapter_that_fills_the_memory_is_prepared_alone():
    reader = Reader()
    reader.passes.set()
    staging = AdapterStaging(reader, 3, 10)
    large, small = staging.add(ref("large", 11)), staging.add(ref("small", 1))
    large.result(60)
    assert staging.keys == ["large"]
    staging.take("large")
    small.result(60)
    assert staging.keys == ["small"]


def test_a_dropped_adapter_is_read_again_when_it_is_needed_again():
    reader = Reader()
    staging = AdapterStaging(reader, 2, None)
    first = staging.add(ref("a"))
    staging.drop("a")
    staging.drop("a")
    again = staging.add(ref("a"))
    assert again is not first
    reader.passes.set()
    again.result(60)
    assert staging.take("a") == "prepared a" and staging.keys == []


@pytest.mark.parametrize("failure", [error("adapter_changed", adapter="a"), MemoryError()])
def test_a_failure_is_raised_where_the_adapter_is_taken(failure):
    reader = Reader(failure)
    reader.passes.set()
    staging = AdapterStaging(reader, 2, None)
    staging.add(ref("a")).result(60)
    with pytest.raises((AiakqError, MemoryError)) as caught:
        staging.take("a")
    assert caught.value is failure and staging.keys == []


def test_after_an_unexpected_failure_nothing_is_staged():
    reader = Reader(RuntimeError("a bug"))
    reader.passes.set()
    staging = AdapterStaging(reader, 2, None)
    staging.add(ref("a")).result(60)
    assert staging.take("a") is None
