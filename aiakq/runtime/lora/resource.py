"""AdapterResource: the adapters of sequences are in memory while they run. LoRA's part of the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from aiakq.runtime.config.lora import LoraConfig
from aiakq.runtime.engine.executor import Executor
from aiakq.runtime.engine.resources import Resource
from aiakq.runtime.engine.sequence import Sequence
from aiakq.runtime.lora.adapter_pool import AdapterPool
from aiakq.runtime.protocol.command import (
    AdapterStaged,
    Command,
    DropAdapter,
    ExecutorCommand,
    PrepareAdapter,
    UnloadAdapter,
)
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import ADAPTER_FAILED, StepBatch


class AdapterResource(Resource):
    """Adapters in memory and staged.

    Sequences that wait although their request has begun, because they were preempted or another sequence of the request
    has run, pin their adapter: some of the output may have been read.

    reads  adapters by key that the executor reads while steps run.
    """

    def __init__(self, config: LoraConfig) -> None:
        self.pool = AdapterPool(config)
        self.reads: dict[str, Future[Exception | None]] = {}
        self._expected: set[str] = set()  # ids of sequences that the pool counts before they are added
        self._begun: set[Sequence] = set()  # it, or another sequence of its request, has run
        self._siblings: dict[str, list[Sequence]] = {}  # by group: those of requests that have not begun

    def expect(self, spec: RequestSpec) -> None:
        if spec.options.adapter is not None:
            self.pool.add(spec.options.adapter)
            self._expected.add(spec.request_id)

    def withdraw(self, spec: RequestSpec) -> None:
        if spec.request_id in self._expected:
            self._expected.remove(spec.request_id)
            self.pool.remove(spec.options.adapter)

    def add(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            if sequence.id in self._expected:
                self._expected.remove(sequence.id)
            else:
                self.pool.add(sequence.adapter)
            if sequence.spec.group:
                self._siblings.setdefault(sequence.spec.group, []).append(sequence)

    def admits(self, sequence: Sequence) -> bool:
        return self.pool.admits(sequence.adapter, sequence in self._begun)

    def acquire(self, sequence: Sequence) -> None:
        if sequence.adapter is None:
            return
        self.pool.start(sequence.adapter)
        if sequence in self._begun:
            self.pool.unpin(sequence.adapter)
            return
        self._begun.add(sequence)
        for sibling in self._siblings.pop(sequence.spec.group, ()):
            if sibling is not sequence:
                self._begun.add(sibling)
                self.pool.pin(sibling.adapter)

    def release(self, sequence: Sequence) -> None:
        if sequence.adapter is not None:
            self.pool.stop(sequence.adapter)
            self.pool.pin(sequence.adapter)

    def remove(self, sequence: Sequence) -> None:
        if sequence.adapter is None:
            return
        if sequence in self._begun:
            self._begun.remove(sequence)
            self.pool.unpin(sequence.adapter)
        elif (siblings := self._siblings.get(sequence.spec.group)) is not None:
            siblings.remove(sequence)
            if not siblings:
                del self._siblings[sequence.spec.group]
        self.pool.remove(sequence.adapter)

    def fail(self, sequence: Sequence, failure: str) -> None:
        if failure.startswith(ADAPTER_FAILED) and sequence.adapter is not None:
            self.pool.unload(sequence.adapter.key)  # a later request has it read again

    def end_step(self, waiting: Iterator[Sequence]) -> None:
        self.pool.end_step(sequence.adapter for sequence in waiting)

    def prepare(self, executor: Executor) -> None:
        """Have the executor read the adapters that waiting sequences need, and drop those that none needs any more."""
        dropped, wanted = self.pool.staging_changes()
        if dropped:
            executor.submit(StepBatch(commands=list(map(DropAdapter, dropped)))).collect()
        for adapter in dropped:
            self.reads.pop(adapter.key, None)
        for adapter in wanted:
            reading = executor.prepare(PrepareAdapter(adapter))
            assert reading is not None, "the executor has adapters"
            self.reads[adapter.key] = reading

    @property
    def preparations(self) -> Mapping[Command, Future[Any]]:
        return {AdapterStaged(key): reading for key, reading in self.reads.items()}

    def commands(self) -> list[ExecutorCommand]:
        return [*self.pool.changes()]

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        return {
            UnloadAdapter: lambda command: self.pool.unload(command.key, is_replaced=True),
            AdapterStaged: self._set_ready,
        }

    def _set_ready(self, command: AdapterStaged) -> None:
        if self.reads.pop(command.key, None) is not None:
            self.pool.set_ready(command.key)

    def check(self) -> None:
        self.pool.check()
