"""CommandHandlers: what an executor, or a rank that follows one, does with commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from aiakq.runtime.executor.runner import Runner
from aiakq.runtime.executor.sequences import RunningSequences
from aiakq.runtime.protocol.command import ExecutorCommand, Preparation, PrepareAdapter, PrepareGrammar, UseVocabulary
from aiakq.runtime.structured.compiler import GrammarCompiler

#: A function that applies a command. It may return the command as other ranks apply it.
Handler = Callable[[Any], Any]


class CommandHandlers:
    """Functions by the type of the command that they apply. Commands without one have no effect here."""

    def __init__(self, handlers: Mapping[type, Handler]) -> None:
        self._handlers = dict(handlers)

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


def handlers_of(runner: Runner, sequences: RunningSequences, samples: bool) -> dict[type, Handler]:
    """Return the handlers for the features of ``runner`` and ``sequences``.

    samples  whether tokens are sampled here, so that grammars are needed.
    """
    handlers: dict[type, Handler] = {}
    if runner.adapters is not None:
        adapters = runner.adapters
        handlers |= adapters.handlers()
        handlers[PrepareAdapter] = lambda preparation: adapters.staging.add(preparation.adapter)
    if samples:

        def use_vocabulary(command: UseVocabulary) -> None:
            sequences.compiler = GrammarCompiler(command.vocabulary)

        def prepare_grammar(preparation: PrepareGrammar) -> Future[Any] | None:
            return None if sequences.compiler is None else sequences.compiler.prepare(preparation.grammar)

        handlers |= {UseVocabulary: use_vocabulary, PrepareGrammar: prepare_grammar}
    return handlers
