"""The executor protocol: what runs the steps that the engine schedules.

The engine decides what runs; an executor holds the model, the KV memory and its own copy of every running sequence.
Between them pass the records of ``aiakq.runtime.protocol``: integers, strings, floats and lists, which could cross a
process or be broadcast to ranks.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from aiakq.runtime.protocol.command import Preparation
from aiakq.runtime.protocol.step import StepBatch, StepResult


class PendingStep(Protocol):
    """A step that was submitted."""

    def collect(self) -> StepResult:
        """Wait for the step's results. Steps are collected once each, in the order in which they were submitted."""


class CommandsDone:
    """The ``PendingStep`` of a batch without chunks."""

    def collect(self) -> StepResult:
        """Return an empty result."""
        return StepResult()


class Executor(Protocol):
    """Runs the steps that an engine schedules, one after the other."""

    def submit(self, batch: StepBatch) -> PendingStep:
        """Start a step behind those that are pending, without waiting for them.

        A chunk may end with the token that the step before samples. Its own token is sampled only when that step was
        collected: it may depend on every token before it.
        """

    def prepare(self, preparation: Preparation) -> Future[Any] | None:
        """Start what later sequences need, while steps run. The future is done when a batch need not wait for it; None
        if nothing is to be waited for.
        """
