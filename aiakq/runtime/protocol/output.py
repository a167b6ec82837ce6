"""What the engine returns after a step: new tokens of each request, and statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from aiakq.runtime.protocol.pooling_params import Pooled
from aiakq.runtime.protocol.step import TokenLogprobs

#: The ``error`` of a sequence whose chunk exceeds the memory even in a step of its own.
OUT_OF_MEMORY = "its part of a step does not fit into memory"


@dataclass
class RequestTimes:
    """Seconds on the engine's clock (the ``now`` passed to step)."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass
class TokenOutput:
    """The output of a step for one request.

    token_ids          tokens generated in this step.
    token_logprobs     raw log-probabilities of these tokens (before temperature and penalties).
    logprobs           log-probabilities per generated token, if requested.
    prompt_logprobs    log-probabilities of the whole prompt, with the first output if requested; its first entry is
                       None.
    finish_reason      "stop", "length", "abort" or "error" with the last output, else None.
    stop_reason        the stop token id that ended the sequence, or "repetition_detected"; None for an EOS token.
    num_cached_tokens  number of prompt tokens taken from the prefix cache.
    num_preemptions    number of times the sequence was preempted.
    times              timestamps of the request.
    error              why the sequence failed, with finish_reason "error".
    pooled             the pooled prompt, with the last output.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    times: RequestTimes | None = None
    error: str | None = None
    pooled: Pooled | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it has neither tokens nor a pooled prompt."""
        return not self.token_ids and self.pooled is None


@dataclass
class ContinuedOutputs:
    """The outputs of a step for requests of which nothing is new but one token, in columns: see ``TokenOutput``.

    logprobs  one per request, None for those that did not ask; empty if none did.
    """

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)
    num_preemptions: list[int] = field(default_factory=list)
    times: list[RequestTimes] = field(default_factory=list)

    def of(self, rows: Iterable[int]) -> ContinuedOutputs:
        """The outputs with these numbers."""
        columns: list[list[Any]] = list(vars(self).values())
        return ContinuedOutputs(*[[column[row] for row in rows] if column else [] for column in columns])

    def each(self) -> list[TokenOutput]:
        """The same as records."""
        outputs = [
            TokenOutput(request_id, [token], [logprob], None, None, None, None, cached, preemptions, times)
            for request_id, token, logprob, cached, preemptions, times in zip(
                self.request_ids,
                self.token_ids,
                self.token_logprobs,
                self.num_cached_tokens,
                self.num_preemptions,
                self.times,
                strict=True,
            )
        ]
        for output, found in zip(outputs, self.logprobs, strict=False):
            output.logprobs = None if found is None else [found]
        return outputs


@dataclass
class DraftCounts:
    """Counters of speculative decoding since the start.

    steps     verifications: times that a sequence had draft tokens in a step.
    drafts    draft tokens.
    accepted  accepted draft tokens; ``by_position``: of the first, second, ... draft token of a verification.
    """

    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """One sequence had ``num_drafts`` in a step."""
        self.steps += 1
        self.drafts += num_drafts
        self.accepted += num_accepted
        self.by_position += [0] * (num_drafts - len(self.by_position))
        for position in range(num_accepted):
            self.by_position[position] += 1

    def copy(self) -> DraftCounts:
        """The counts as they are now."""
        return DraftCounts(self.steps, self.drafts, self.accepted, list(self.by_position))

    def __add__(self, other: DraftCounts) -> DraftCounts:
        """Those of two engines together."""
        by_position = [one + two for one, two in zip_longest(self.by_position, other.by_position, fillvalue=0)]
        return DraftCounts(
            self.steps + other.steps, self.drafts + other.drafts, self.accepted + other.accepted, by_position
        )


@dataclass
class EngineStats:
    """Statistics of the engine after a step: current gauges, and counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    num_scheduled_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    num_clients: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def kv_usage(self) -> float:
        """The fraction of KV cache pages in use, between 0 and 1."""
        return 1 - self.num_free_pages / self.num_pages if self.num_pages else 0.0

    def __add__(self, other: EngineStats) -> EngineStats:
        """Return the sum of the statistics of two engines."""
        return EngineStats(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class StepOutput:
    """The result of one ``Engine.step``.

    outputs    of requests that began, ended or got more than a token.
    continued  of the others that got one.
    """

    outputs: list[TokenOutput] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    continued: ContinuedOutputs = field(default_factory=ContinuedOutputs)

    def all_outputs(self) -> list[TokenOutput]:
        """The outputs of all requests."""
        return self.outputs + self.continued.each() if self.continued.request_ids else self.outputs

    def date(self, began: float, ended: float) -> None:
        """Set the times of new tokens to the end of the step; the engine has no clock and recorded its start."""
        for output in self.outputs:
            if output.times is not None and (output.token_ids or output.pooled is not None):
                output.times.last_token = ended
                if output.times.first_token == began:
                    output.times.first_token = ended
        for times in self.continued.times:
            times.last_token = ended
