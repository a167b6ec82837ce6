"""AdapterStaging: adapters that a thread reads and prepares while steps run, before a step loads them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from aiakq.errors import AiakqError
from aiakq.runtime.engine.adapters import AdapterRef

T = TypeVar("T")


class _Staged(Generic[T]):
    """An adapter that waits to be loaded.

    ready       done when it is prepared or has failed.
    is_started  whether it has been given to the thread, because there is room for it.
    """

    def __init__(self, adapter: AdapterRef) -> None:
        self.adapter = adapter
        self.ready: Future[None] = Future()
        self.is_started = self.is_dropped = False
        self.prepared: T | None = None
        self.failure: AiakqError | MemoryError | None = None


class AdapterStaging(Generic[T]):
    """Adapters by key, as ``prepare`` returns them; at most ``max_adapters`` at a time, of at most ``max_bytes``.

    Further ones start when those before them have been taken or dropped. All methods are called by one thread.
    """

    def __init__(self, prepare: Callable[[AdapterRef], T], max_adapters: int, max_bytes: int | None) -> None:
        self._prepare, self._max_adapters, self._max_bytes = prepare, max_adapters, max_bytes
        self._staged: dict[str, _Staged[T]] = {}
        self._thread: ThreadPoolExecutor | None = None

    @property
    def keys(self) -> list[str]:
        """Keys of the adapters that have room, the oldest first."""
        return [key for key, staged in self._staged.items() if staged.is_started]

    def add(self, adapter: AdapterRef) -> Future[None]:
        """Prepare an adapter, unless that has begun; the future is done when it can be taken, even if it failed."""
        staged = self._staged.get(adapter.key)
        if staged is None:
            staged = self._staged[adapter.key] = _Staged(adapter)
            self._start()
        return staged.ready

    def take(self, key: str) -> T | None:
        """Remove and return an adapter, waiting until it is prepared; None if its preparation has not begun.

        Raises the failure of ``prepare``, if it was an ``AiakqError`` or a ``MemoryError``.
        """
        staged = self._staged.get(key)
        if staged is None:
            return None
        if staged.is_started:
            staged.ready.result()
        self.drop(key)
        if staged.failure is not None:
            raise staged.failure
        return staged.prepared

    def drop(self, key: str) -> None:
        """Remove an adapter, if it is there."""
        staged = self._staged.pop(key, None)
        if staged is None:
            return
        staged.is_dropped = True
        if not staged.is_started:
            staged.ready.set_result(None)
        self._start()

    def _start(self) -> None:
        """Give adapters to the thread in order, as long as there is room for the next."""
        started = [staged.adapter.nbytes for staged in self._staged.values() if staged.is_started]
        for staged in self._staged.values():
            if staged.is_started:
                continue
            started.append(staged.adapter.nbytes)
            too_large = self._max_bytes is not None and sum(started) > self._max_bytes
            if len(started) > 1 and (too_large or len(started) > self._max_adapters):
                return
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "staging")
            staged.is_started = True
            self._thread.submit(self._run, staged)

    def _run(self, staged: _Staged[T]) -> None:
        try:
            if not staged.is_dropped:
                staged.prepared = self._prepare(staged.adapter)
        except (AiakqError, MemoryError) as failure:
            staged.failure = failure
        except Exception:
            pass  # Nothing is prepared: the step that needs the adapter reads it itself, and raises this again.
        finally:
            staged.ready.set_result(None)
