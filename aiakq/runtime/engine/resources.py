"""Resource: what sequences need in order to run, besides slots and pages, such as adapters in memory. StepExtension: a
resource that also has a part in steps, such as draft tokens.

A feature that admits sequences is a subclass, which ``Scheduler`` is given; neither it nor the engine knows which there
are. Its methods are called in this order for every sequence: ``add``, then any number of times ``admits``, ``acquire``
and ``release``, then ``remove``. What prepares requests elsewhere may announce their sequences before, with ``expect``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from aiakq.runtime.engine.executor import Executor
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.protocol.command import Command, ExecutorCommand
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.step import ChunkResult


class Resource:
    """A resource of which there is always enough; subclasses override what they need."""

    def expect(self, spec: RequestSpec) -> None:
        """A sequence will be added, unless it is withdrawn before."""

    def withdraw(self, spec: RequestSpec) -> None:
        """A sequence that is expected will not be added."""

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits."""

    def admits(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence may start now."""
        return True

    def acquire(self, sequence: Sequence) -> None:
        """A sequence starts that every resource admits."""

    def release(self, sequence: Sequence) -> None:
        """A sequence stops running: it has ended, or was preempted and waits again."""

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended, and does not run any more."""

    def fail(self, sequence: Sequence, failure: str) -> None:
        """A sequence ends with ``failure`` of the executor; ``remove`` follows."""

    def end_step(self, waiting: Iterator[Sequence]) -> None:
        """The sequences of a step have been chosen; ``waiting`` are the others, in the order in which they start."""

    def prepare(self, executor: Executor) -> None:
        """Have the executor prepare what later steps need."""

    @property
    def preparations(self) -> Mapping[Command, Future[Any]]:
        """What the executor prepares while steps run: when a future is done, the engine gets the command."""
        return {}

    def commands(self) -> list[ExecutorCommand]:
        """Return the executor's commands for the next batch."""
        return []

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """Return the functions that carry out commands to the engine, by the type of the command."""
        return {}

    def handle(self, command: Command) -> bool:
        """Carry out a command to the engine, if it is one of this resource; return whether it is."""
        handler = self.handlers().get(type(command))
        if handler is not None:
            handler(command)
        return handler is not None

    def check(self) -> None:
        """Assert the invariants that hold between steps."""


class StepExtension(Resource):
    """A resource that extends the chunks of steps, and reads its part of their results."""

    def awaits_results(self, running: list[Sequence]) -> bool:
        """Return whether the next step needs the results of pending ones. ``running`` are the sequences that run."""
        return False

    def extend(self, chosen: list[ScheduledChunk], running: list[Sequence], has_prompts: bool) -> None:
        """Extend the chunks of a step, which are modified.

        has_prompts  whether some of ``chosen`` are parts of prompts.
        """

    def commit(self, chunk: ScheduledChunk, result: ChunkResult, num_drafts: int) -> None:
        """The sequence of ``chunk`` has been continued with what ``result`` contains.

        num_drafts  draft tokens that the chunk had; it has the accepted ones now.
        """
