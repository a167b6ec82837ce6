"""HeldRequests: requests whose grammar is being compiled, while steps of others run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from aiakq.runtime.engine.executor import Executor
from aiakq.runtime.engine.resources import Resource
from aiakq.runtime.protocol.command import PrepareGrammar
from aiakq.runtime.protocol.output import TokenOutput
from aiakq.runtime.protocol.request import RequestSpec

#: Seconds that an idle engine waits for a grammar before it polls for messages again.
_PAUSE = 0.005


class HeldRequests:
    """Requests that wait for ``executor`` to compile their grammar, and the compiled grammars of those that run.

    resources  of the scheduler, which expect the sequences that wait here.
    """

    def __init__(self, executor: Executor, resources: Sequence[Resource]) -> None:
        self._executor, self._resources = executor, resources
        self._held: list[tuple[Future[object], RequestSpec]] = []
        self._in_use: dict[str, Future[object]] = {}  # the futures keep the grammars in memory

    def hold(self, specs: Sequence[RequestSpec]) -> list[RequestSpec]:
        """Hold the requests whose grammar is being compiled, and return the others."""
        free = []
        for spec in specs:
            compiling = None if spec.grammar is None else self._executor.prepare(PrepareGrammar(spec.grammar))
            if compiling is not None:
                self._in_use[spec.request_id] = compiling
            if compiling is None or compiling.done():
                free.append(spec)
            else:
                self._held.append((compiling, spec))
                for resource in self._resources:
                    resource.expect(spec)
        return free

    def ready(self) -> list[RequestSpec]:
        """Remove and return the requests whose grammar is compiled."""
        ready = [spec for compiling, spec in self._held if compiling.done()]
        self._held = [each for each in self._held if not each[0].done()] if ready else self._held
        return ready

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Remove these requests. Grammars that no other request waits for are not compiled."""
        gone = set(request_ids)
        for _, spec in self._held:
            if spec.request_id in gone:
                for resource in self._resources:
                    resource.withdraw(spec)
        self._held = [each for each in self._held if each[1].request_id not in gone]
        for request_id in gone:
            if (compiling := self._in_use.pop(request_id, None)) is not None:
                compiling.cancel()

    def finish(self, outputs: Iterable[TokenOutput]) -> None:
        """Release the grammars of requests that have ended."""
        if self._in_use:
            for output in outputs:
                if output.finish_reason is not None:
                    self._in_use.pop(output.request_id, None)

    def wait(self) -> bool:
        """Wait briefly if any request is held; return whether one is. The engine is idle."""
        if self._held:
            wait([compiling for compiling, _ in self._held], timeout=_PAUSE, return_when=FIRST_COMPLETED)
        return bool(self._held)
