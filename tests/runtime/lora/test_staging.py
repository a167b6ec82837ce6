"""Adapters that a thread prepares before they are loaded: their order, and failures."""

from __future__ import annotations

import threading

import pytest

from aiakq.errors import error
from aiakq.runtime.lora.staging import AdapterStaging
from aiakq.runtime.protocol.adapters import AdapterRef


def ref(key: str) -> AdapterRef:
    return AdapterRef(key, f"name of {key}", f"/adapters/{key}", 10)


class Reader:
    """Prepares adapters once they may pass."""

    def __init__(self, failure: Exception | None = None) -> None:
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
    staging = AdapterStaging(reader)
    ready = staging.add(ref("a"))
    assert staging.add(ref("a")) is ready and not ready.done()
    reader.passes.set()
    ready.result(60)
    assert staging.take("a") == "prepared a" and reader.read == ["a"] and staging.keys == []
    with pytest.raises(KeyError):
        staging.take("a")


def test_taking_waits_for_the_thread():
    """Other ranks than the first may be slower than it."""
    reader = Reader()
    staging = AdapterStaging(reader)
    staging.add(ref("a"))
    threading.Timer(0.01, reader.passes.set).start()
    assert staging.take("a") == "prepared a"


def test_adapters_are_prepared_in_order_and_those_that_were_dropped_are_not():
    reader = Reader()
    staging = AdapterStaging(reader)
    futures = {key: staging.add(ref(key)) for key in "abcd"}
    staging.drop("b")
    staging.drop("b")
    reader.passes.set()
    for future in futures.values():
        future.result(60)
    assert reader.read == ["a", "c", "d"] and staging.keys == ["a", "c", "d"]


def test_a_dropped_adapter_is_read_again_when_it_is_needed_again():
    reader = Reader()
    staging = AdapterStaging(reader)
    first = staging.add(ref("a"))
    staging.drop("a")
    again = staging.add(ref("a"))
    assert again is not first
    reader.passes.set()
    again.result(60)
    assert staging.take("a") == "prepared a" and staging.keys == []


@pytest.mark.parametrize("failure", [error("adapter_changed", adapter="a"), MemoryError(), RuntimeError("a bug")])
def test_a_failure_is_raised_where_the_adapter_is_taken(failure):
    reader = Reader(failure)
    reader.passes.set()
    staging = AdapterStaging(reader)
    staging.add(ref("a")).result(60)
    with pytest.raises(type(failure)) as caught:
        staging.take("a")
    assert caught.value is failure and staging.keys == []
