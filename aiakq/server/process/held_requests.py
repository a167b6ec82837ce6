"""HeldRequests: requests that wait for their grammar or their LoRA adapter, while steps of others run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from aiakq.runtime.engine.adapters import AdapterRef
from aiakq.runtime.engine.messages import RequestSpec
from aiakq.runtime.engine.records import Executor

#: Seconds that an idle engine waits for a grammar or an adapter before it polls for messages again.
_PAUSE = 0.005


class HeldRequests:
    """Requests that wait for ``executor`` to compile their grammar and to read their adapter."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._held: list[tuple[list[Future[None]], RequestSpec]] = []
        self._needed: dict[str, AdapterRef] = {}  # adapters that were read for requests that have not started

    def hold(self, specs: Sequence[RequestSpec]) -> list[RequestSpec]:
        """Hold the requests for which something is being prepared, and return the others."""
        free = []
        for spec in specs:
            preparing = self._prepare(spec)
            if _are_done(preparing):
                free.append(spec)
            else:
                self._held.append((preparing, spec))
        return free

    def ready(self) -> list[RequestSpec]:
        """Remove and return the requests for which everything is prepared."""
        ready = [spec for preparing, spec in self._held if _are_done(preparing)]
        self._held = [each for each in self._held if not _are_done(each[0])] if ready else self._held
        return ready

    def started(self, request_ids: Iterable[str]) -> None:
        """Record that the next step starts these requests and loads their adapters."""
        if self._needed:
            for request_id in request_ids:
                self._needed.pop(request_id, None)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Remove these requests, and drop adapters that no other request needs."""
        gone = set(request_ids)
        self._held = [each for each in self._held if each[1].request_id not in gone]
        self._forget(gone)

    def wait(self) -> bool:
        """Wait briefly if any request is held; return whether one is. The engine is idle."""
        if self._needed:
            held = {spec.request_id for _, spec in self._held}
            self._forget([request_id for request_id in self._needed if request_id not in held])  # finished
        if self._held:
            pending = [each for preparing, _ in self._held for each in preparing if not each.done()]
            wait(pending, timeout=_PAUSE, return_when=FIRST_COMPLETED)
        return bool(self._held)

    def _prepare(self, spec: RequestSpec) -> list[Future[None]]:
        """Start the preparations of a request, and return those to wait for."""
        preparing = []
        if spec.grammar is not None:
            preparing.append(self._executor.prepare_grammar(spec.grammar))
        if spec.adapter is not None:
            preparing.append(self._executor.prepare_adapter(spec.adapter))
            if preparing[-1] is not None:
                self._needed[spec.request_id] = spec.adapter
        return [each for each in preparing if each is not None]

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Drop the adapters of these requests, unless others need them."""
        dropped = [adapter for each in request_ids if (adapter := self._needed.pop(each, None)) is not None]
        if dropped:
            needed = {adapter.key for adapter in self._needed.values()}
            for adapter in {adapter.key: adapter for adapter in dropped if adapter.key not in needed}.values():
                self._executor.forget_adapter(adapter)


def _are_done(preparing: Sequence[Future[None]]) -> bool:
    return all(each.done() for each in preparing)
