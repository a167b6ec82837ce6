"""AdapterChecks: LoRA adapters that are checked, or read before requests name them, while the engine's steps run."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from aiakq.errors import AiakqError, error, one_line
from aiakq.runtime.lora.resource import AdapterResource
from aiakq.server.process.ipc import AdapterChecked, CheckAdapter, PrefetchAdapter
from aiakq.system.channel import Failure

if TYPE_CHECKING:
    from aiakq.runtime.engine.engine import Engine

#: Seconds that an idle engine waits for a check before it polls for messages again.
_PAUSE = 0.005


class AdapterChecks:
    """Checks of adapters against the engine's limits, and reads of those that replace others."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._adapters = engine.scheduler.resource(AdapterResource)
        self._limits = engine.limits.adapters
        self._threads: ThreadPoolExecutor | None = None
        self._running: list[Future[AdapterChecked]] = []
        self._asked: list[PrefetchAdapter] = []
        self._prefetched: list[tuple[PrefetchAdapter, Future[Exception | None]]] = []

    def start(self, record: CheckAdapter) -> None:
        """Start checking an adapter."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "adapters")
        self._running.append(self._threads.submit(self._check, record))

    def prefetch(self, record: PrefetchAdapter) -> None:
        """Have ``begin_prefetches`` start reading an adapter."""
        self._asked.append(record)

    def begin_prefetches(self) -> None:
        """Start reading adapters, unless requests still have them from before they were unloaded."""
        for record in self._asked:
            self._begin_prefetch(record)
        self._asked.clear()

    def _begin_prefetch(self, record: PrefetchAdapter) -> None:
        assert self._adapters is not None, "no adapter passes the check without a pool of them"
        adapter, pool = record.adapter, self._adapters.pool
        reading: Future[Exception | None] = Future()
        if not pool.prefetch(adapter):
            reading.set_result(error("adapters_in_use", name=adapter.name[:64]))
        elif pool.is_resident(adapter.key):
            reading.set_result(None)
        else:
            self._adapters.prepare(self._engine.executor)
            reading = self._adapters.reads[adapter.key]
        self._prefetched.append((record, reading))

    def done(self) -> list[AdapterChecked]:
        """Remove and return the finished checks and reads."""
        ended = [each for each in self._running if each.done()]
        if ended:
            self._running = [each for each in self._running if each not in ended]
        read = [each for each in self._prefetched if each[1].done()]
        if read:
            self._prefetched = [each for each in self._prefetched if each not in read]
        for record, reading in read:
            if reading.result() is not None and self._adapters is not None:
                self._adapters.pool.unload(record.adapter.key)  # the next attempt reads it again
        return [*(each.result() for each in ended), *(_reply(record, reading.result()) for record, reading in read)]

    def wait(self) -> bool:
        """Wait briefly if a check or a read is running; return whether one is."""
        pending: list[Future[Any]] = [*self._running, *(reading for _, reading in self._prefetched)]
        if pending:
            wait(pending, timeout=_PAUSE, return_when=FIRST_COMPLETED)
        return bool(pending)

    def _check(self, record: CheckAdapter) -> AdapterChecked:
        from aiakq.runtime.lora.requests import check_adapter

        try:
            adapter = check_adapter(record.name, record.path, self._limits, record.root)
        except AiakqError as failure:
            return AdapterChecked(record.number, failure=Failure.of(failure))
        except BaseException as problem:  # a panic of a native library is no Exception
            unreadable = error("adapter_malformed", adapter=record.name, reason=one_line(problem))
            return AdapterChecked(record.number, failure=Failure.of(unreadable))
        return AdapterChecked(record.number, adapter)


def _reply(record: PrefetchAdapter, failure: Exception | None) -> AdapterChecked:
    """Return the reply to ``record``, which was read or failed."""
    if failure is None:
        return AdapterChecked(record.number, record.adapter)
    if not isinstance(failure, AiakqError):
        failure = error("adapter_malformed", adapter=record.adapter.name, reason=one_line(failure))
    return AdapterChecked(record.number, failure=Failure.of(failure))
