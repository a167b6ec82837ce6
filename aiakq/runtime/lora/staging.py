"""AdapterStaging: adapters that a thread reads and packs while steps run, before a step loads them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from aiakq.runtime.protocol.adapters import AdapterRef

T = TypeVar("T")


class _Staged(Generic[T]):
    """An adapter that waits to be loaded.

    ready     done when ``prepared`` or ``failure`` is set, or the adapter was dropped before its turn.
    prepared  what ``prepare`` returned.
    failure   what ``prepare`` raised.
    """

    def __init__(self, adapter: AdapterRef) -> None:
        self.adapter = adapter
        self.ready: Future[Exception | None] = Future()
        self.is_dropped = False
        self.prepared: T | None = None
        self.failure: Exception | None = None


class AdapterStaging(Generic[T]):
    """Adapters by key, prepared by one thread in the order in which they are added.

    Their number is limited by ``AdapterPool``. All methods are called by one thread.
    """

    def __init__(self, prepare: Callable[[AdapterRef], T]) -> None:
        self._prepare = prepare
        self._staged: dict[str, _Staged[T]] = {}
        self._thread: ThreadPoolExecutor | None = None

    @property
    def keys(self) -> list[str]:
        """Return the keys of the adapters, the oldest first."""
        return list(self._staged)

    def add(self, adapter: AdapterRef) -> Future[Exception | None]:
        """Queue an adapter, unless it is there already. The future is done when it can be taken; its result is what
        ``prepare`` raised, if it did.
        """
        staged = self._staged.get(adapter.key)
        if staged is None:
            staged = self._staged[adapter.key] = _Staged(adapter)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "staging")
            self._thread.submit(self._run, staged)
        return staged.ready

    def take(self, key: str) -> T:
        """Remove and return an adapter that was added, waiting until it is prepared. Raises what ``prepare`` raised."""
        staged = self._staged.pop(key)
        staged.ready.result()
        if staged.failure is not None:
            raise staged.failure
        assert staged.prepared is not None
        return staged.prepared

    def drop(self, key: str) -> None:
        """Remove an adapter, if it is there; it is not prepared if that has not begun."""
        staged = self._staged.pop(key, None)
        if staged is not None:
            staged.is_dropped = True

    def _run(self, staged: _Staged[T]) -> None:
        try:
            if not staged.is_dropped:
                staged.prepared = self._prepare(staged.adapter)
        except Exception as failure:
            staged.failure = failure
        finally:
            staged.ready.set_result(staged.failure)
