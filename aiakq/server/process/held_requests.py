"""HeldRequests: requests that wait for their grammar to be compiled, while steps of others run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from aiakq.runtime.engine.messages import RequestSpec
from aiakq.runtime.engine.records import Executor

#: Seconds that an idle engine waits for a grammar before it polls for messages again.
_PAUSE = 0.005


class HeldRequests:
    """Requests that wait for ``executor`` to compile their grammar."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._held: list[tuple[Future[None], RequestSpec]] = []

    def hold(self, specs: Sequence[RequestSpec]) -> list[RequestSpec]:
        """Hold the requests whose grammar is being compiled, and return the others."""
        free = []
        for spec in specs:
            preparing = None if spec.grammar is None else self._executor.prepare_grammar(spec.grammar)
            if preparing is None or preparing.done():
                free.append(spec)
            else:
                self._held.append((preparing, spec))
        return free

    def ready(self) -> list[RequestSpec]:
        """Remove and return the requests whose grammar is compiled."""
        found = [spec for preparing, spec in self._held if preparing.done()]
        self._held = [each for each in self._held if not each[0].done()] if found else self._held
        return found

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Remove these requests, if they are held."""
        gone = set(request_ids)
        self._held = [each for each in self._held if each[1].request_id not in gone]

    def wait(self) -> bool:
        """Wait briefly for a grammar if any request is held; return whether one is."""
        if self._held:
            wait([preparing for preparing, _ in self._held], timeout=_PAUSE, return_when=FIRST_COMPLETED)
        return bool(self._held)
