"""HeldRequests: requests whose grammar is being compiled, while steps of others run."""

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
            compiling = None if spec.grammar is None else self._executor.prepare_grammar(spec.grammar)
            if compiling is None or compiling.done():
                free.append(spec)
            else:
                self._held.append((compiling, spec))
        return free

    def ready(self) -> list[RequestSpec]:
        """Remove and return the requests whose grammar is compiled."""
        ready = [spec for compiling, spec in self._held if compiling.done()]
        self._held = [each for each in self._held if not each[0].done()] if ready else self._held
        return ready

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Remove these requests."""
        gone = set(request_ids)
        self._held = [each for each in self._held if each[1].request_id not in gone]

    def wait(self) -> bool:
        """Wait briefly if any request is held; return whether one is. The engine is idle."""
        if self._held:
            wait([compiling for compiling, _ in self._held], timeout=_PAUSE, return_when=FIRST_COMPLETED)
        return bool(self._held)
