"""An executor whose records are encoded, for the tests of the runtime."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import pytest

from aiakq import LLM
from aiakq.runtime.engine.executor import Executor, PendingStep
from aiakq.runtime.protocol.command import Preparation
from aiakq.runtime.protocol.step import StepBatch, StepResult

T = TypeVar("T")


class EncodingExecutor:
    """An executor behind records that are encoded and decoded, as if they crossed to another process.

    num_bytes  of all records so far.
    """

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_bytes = 0

    def submit(self, batch: StepBatch) -> PendingStep:
        return EncodingPendingStep(self, self.inner.submit(self.crossed(batch, StepBatch)))

    def prepare(self, preparation: Preparation) -> Future[Any] | None:
        return self.inner.prepare(self.crossed(preparation, Preparation))

    def crossed(self, record: T, type_: type[T]) -> T:
        encoded = msgspec.msgpack.encode(record)
        self.num_bytes += len(encoded)
        return msgspec.msgpack.decode(encoded, type=type_)


class EncodingPendingStep:
    def __init__(self, executor: EncodingExecutor, inner: PendingStep) -> None:
        self.executor, self.inner = executor, inner

    def collect(self) -> StepResult:
        return self.executor.crossed(self.inner.collect(), StepResult)


@pytest.fixture(scope="session")
def rank_arguments() -> dict[str, Any]:
    """Arguments that distribute a model, from ``AIAKQ_RANKS`` as JSON: the suite then runs over several ranks."""
    return json.loads(os.environ.get("AIAKQ_RANKS", "{}"))


@pytest.fixture
def behind_bytes() -> Callable[[LLM], LLM]:
    """A function that puts the executor of an ``LLM`` behind an ``EncodingExecutor``."""

    def changed(llm: LLM) -> LLM:
        llm.engine.executor = EncodingExecutor(llm.engine.executor)
        return llm

    return changed
