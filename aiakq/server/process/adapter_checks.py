"""AdapterChecks: LoRA adapters that are checked, or read before requests name them, while the engine's steps run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from aiakq.errors import AiakqError, error, one_line
from aiakq.runtime.lora.resource import AdapterResource
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.command import UnloadAdapter
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
        self._ending: dict[str, AdapterRef | None] = {}  # to be unloaded; not None: the pool counts a sequence
        self._counted: list[AdapterRef] = []  # of which the pool counts a sequence until the next message
        self._prefetched: list[tuple[PrefetchAdapter, Future[Exception | None]]] = []

    def start(self, record: CheckAdapter) -> None:
        """Start checking an adapter."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "adapters")
        self._running.append(self._threads.submit(self._check, record))

    def unload(self, key: str) -> None:
        """Unload an adapter when no request uses it; none that is submitted from now on does."""
        self._ending.setdefault(key, None)

    def unloads(self, held: Callable[[], dict[str, AdapterRef]]) -> list[UnloadAdapter]:
        """Return the messages that unload adapters, to be sent after all requests that are ready.

        held  adapters of the requests that wait for their grammar. The pool counts one sequence for each that is to be
              unloaded, so that it stays in memory.
        """
        if self._adapters is None or not (self._ending or self._counted):
            return []
        pool = self._adapters.pool
        for adapter in self._counted:  # its requests have been sent before
            pool.remove(adapter)
        self._counted, needed, messages = [], held(), []
        for key, counted in list(self._ending.items()):
            if key not in needed:
                messages.append(UnloadAdapter(key))
                self._counted += [] if counted is None else [counted]
                del self._ending[key]
            elif counted is None:
                self._ending[key] = needed[key]
                pool.add(needed[key])
                messages.append(UnloadAdapter(key))
        return messages

    def prefetch(self, record: PrefetchAdapter) -> None:
        """Start reading an adapter, unless requests still have it from before it was unloaded."""
        assert self._adapters is not None, "no adapter passes the check without a pool of them"
        adapter, pool = record.adapter, self._adapters.pool
        reading: Future[Exception | None] = Future()
        if adapter.key in self._ending or not pool.prefetch(adapter):
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
