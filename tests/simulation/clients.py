"""The clients of a simulated engine, what a run counts, and how it fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from model import Alone

from aiakq.runtime.protocol.request import RequestSpec


class Violation(AssertionError):
    """Something that must hold does not."""


def must(holds: object, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(eq=False)
class Client:
    """One request, as who sent it sees it."""

    spec: RequestSpec
    alone: Alone
    place: tuple[int, int]
    got: int = 0
    ended: str | None = None
    deaths: int = 0
    #: In the life of the engine that runs now. pending: tokens that are sampled and not told yet.
    computed: int = 0
    pending: int = 0
    queried: bool = False
    started: bool = False
    counted: bool = False
    resample: bool = False
    starts: int = 1


@dataclass
class Totals:
    """What was seen, for the last line of a run."""

    steps: int = 0
    worlds: int = 0
    requests: int = 0
    tokens: int = 0
    preemptions: int = 0
    cached: int = 0
    drafts: int = 0
    accepted: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(self.ends.items()))
        return (
            f"{self.steps} steps in {self.worlds} worlds: {self.requests} requests ({ends}), {self.tokens} tokens, "
            f"{self.cached} of prompts from the cache, {self.accepted} of {self.drafts} draft tokens accepted, "
            f"{self.preemptions} preemptions, "
            f"{sum(self.faults.values())} faults ({faults})"
        )
