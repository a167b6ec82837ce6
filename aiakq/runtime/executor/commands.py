"""CommandHandlers: what an executor, or a rank that follows one, does with commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from aiakq.runtime.executor.sequences import ExecutorPart
from aiakq.runtime.protocol.command import ExecutorCommand, Preparation

#: A function that applies a command. It may return the command as other ranks apply it.
Handler = Callable[[Any], Any]


class CommandHandlers:
    """Functions by the type of the command that they apply. Commands without one have no effect here."""

    def __init__(self, own: Mapping[type, Handler], parts: Sequence[ExecutorPart]) -> None:
        """own: those of the executor, besides those of the features that have ``parts`` in it."""
        self._handlers = dict(own)
        for part in parts:
            self._handlers |= part.handlers()

    def apply(self, commands: Sequence[ExecutorCommand]) -> list[ExecutorCommand]:
        """Apply commands in order; return them as other ranks apply them."""
        applied = []
        for command in commands:
            handler = self._handlers.get(type(command))
            applied.append((handler and handler(command)) or command)
        return applied

    def prepare(self, preparation: Preparation) -> Future[Any] | None:
        """Start a preparation."""
        handler = self._handlers.get(type(preparation))
        future: Future[object] | None = None if handler is None else handler(preparation)
        return future
