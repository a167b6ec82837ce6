"""The requests of a simulation as their clients see them, the totals of a run, and the exception of a failed check."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simulated_model import ReferenceRequest

from aiakq.runtime.protocol.request import RequestSpec


class Violation(AssertionError):
    """An invariant does not hold."""


def require(condition: object, message: str) -> None:
    """Raise Violation with ``message`` unless ``condition`` is true."""
    if not condition:
        raise Violation(message)


@dataclass(eq=False)
class TrackedRequest:
    """A request, what its client has received, and what the engine should have done with it.

    priority        its place in the order of service: priority, then number of arrival.
    num_received    tokens that its client has.
    finish_reason   None while it is unfinished.
    engine_deaths   engines that ended while it was unfinished.

    Since the current engine started:

    num_computed    positions that were computed or taken from the prefix cache.
    num_pending     tokens that are sampled in a step whose results were not collected.
    num_starts      times that the executor was given the sequence.
    is_queried      whether its prompt was counted as a query of the prefix cache.
    is_started      whether a step contained it.
    is_counted      whether its prompt was counted as computed.
    resamples       whether its last token is sampled again.
    """

    spec: RequestSpec
    reference: ReferenceRequest
    priority: tuple[int, int]
    num_received: int = 0
    finish_reason: str | None = None
    engine_deaths: int = 0
    num_computed: int = 0
    num_pending: int = 0
    num_starts: int = 1
    is_queried: bool = False
    is_started: bool = False
    is_counted: bool = False
    resamples: bool = False


@dataclass
class Totals:
    """Counters over all simulations of a run."""

    steps: int = 0
    simulations: int = 0
    requests: int = 0
    tokens: int = 0
    preemptions: int = 0
    cached: int = 0
    columns: int = 0  # tokens of steps that were scheduled in columns
    drafts: int = 0
    accepted: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.finish_reasons.items()))
        return (
            f"{self.steps} steps in {self.simulations} simulations: {self.requests} requests ({reasons}), "
            f"{self.tokens} tokens, {self.cached} prompt tokens from the cache, "
            f"{self.accepted} of {self.drafts} draft tokens accepted, {self.preemptions} preemptions, "
            f"{sum(self.faults.values())} faults ({faults})"
        )
