"""RequestRecord: what is known of one request to generate, for the log and for traces."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.output import RequestTimes
from aiakq.runtime.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.trace import Span

#: What a request that the client abandoned before its response is logged with; nginx uses the same number.
CLIENT_CLOSED_REQUEST = 499


@dataclass
class SequenceRecord:
    """One sequence of a request. ``times`` are on the engine's clock, which is this process's."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_generated: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    times: RequestTimes | None = None


@dataclass
class RequestRecord:
    """One request, from its arrival to its end. Times are on ``time.monotonic``.

    route              its path, without that of a proxy.
    request_id         as in the response header x-request-id; with its prefix in ``response_id``.
    client_request_id  what the client sent as X-Request-Id; empty if nothing, or nothing that can be logged.
    key                the beginning of the hash of its API key; empty without keys.
    headers            of the request, by lowercase name.
    status             of the response; 499 if the client did not wait for it.
    reason             how it ended, one of ``metrics.FINISH_REASONS``.
    error              the id of the error it ended with.
    phases             name, beginning and end of what was done in this process and the text workers.
    trace_id           of its trace; empty without traces.
    traceparent        W3C's name of its span, which the response has as a header.
    span               of its trace, while it is running.
    epoch_ns           nanoseconds from 1970 to zero of ``time.monotonic``.
    """

    route: str
    request_id: str
    arrival_time: float
    client_request_id: str = ""
    response_id: str = ""
    key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    params: SamplingParams | None = None
    streamed: bool = False
    sequences: list[SequenceRecord] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    end_time: float = 0.0
    status: int = 200
    reason: str = ""
    error: str | None = None
    trace_id: str = ""
    traceparent: str = ""
    span: Span | None = None
    epoch_ns: int = field(default_factory=lambda: time.time_ns() - time.monotonic_ns())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record how long the body of a ``with`` statement takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases.append((name, began, time.monotonic()))

    def end(self, reason: str, failure: AiakqError | None) -> None:
        """The request has ended."""
        self.end_time = time.monotonic()
        self.reason = reason
        self.error = None if failure is None else failure.id
        if not self.streamed:
            self.status = 200 if failure is None else failure.http_status
            if reason == "abort":
                self.status = CLIENT_CLOSED_REQUEST

    def nanoseconds(self, moment: float) -> int:
        """``moment`` as nanoseconds since 1970."""
        return self.epoch_ns + int(moment * 1e9)

    def total(self, name: str) -> int:
        """The sum of a field of all sequences."""
        return sum(getattr(sequence, name) for sequence in self.sequences)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens; those of a prompt count once, however many sequences continue it."""
        n = self.params.num_sequences if self.params else 1
        return sum(sequence.num_prompt_tokens for sequence in self.sequences[::n])

    @property
    def num_cached_tokens(self) -> int:
        """Those of them that came from the prefix cache."""
        n = self.params.num_sequences if self.params else 1
        return sum(sequence.num_cached_tokens for sequence in self.sequences[::n])

    @property
    def queue_seconds(self) -> float | None:
        """Seconds in the engine's queue until the first step, as in the metric; None if there was no step."""
        arrived, scheduled = self.earliest("arrived"), self.earliest("scheduled")
        return None if arrived is None or scheduled is None else scheduled - arrived

    def earliest(self, name: str) -> float | None:
        """The first time that is recorded in a field of ``RequestTimes``."""
        times = [getattr(sequence.times, name) for sequence in self.sequences if sequence.times]
        return min((time for time in times if time is not None), default=None)

    def latest(self, name: str) -> float | None:
        """The last time that is recorded in a field of ``RequestTimes``."""
        times = [getattr(sequence.times, name) for sequence in self.sequences if sequence.times]
        return max((time for time in times if time is not None), default=None)


class RequestObserver(Protocol):
    """Is called for every generation request. Must return at once and raise nothing."""

    def begin(self, record: RequestRecord) -> None:
        """A request has arrived; its record has what its head says."""

    def finish(self, record: RequestRecord) -> None:
        """It has ended."""

    def stop(self, seconds: float) -> None:
        """The server ends; what is not written after ``seconds`` is lost."""


def log_fields(record: RequestRecord) -> dict[str, object]:
    """Log record of a finished request; contains nothing of its prompt or its text."""

    def milliseconds(end: float | None) -> float | None:
        return None if end is None else round(1000 * (end - record.arrival_time), 2)

    fields: dict[str, object] = {
        "request_id": record.request_id,
        "client_request_id": record.client_request_id,
        "trace_id": record.trace_id,
        "route": record.route,
        "model": record.model,
        "status": record.status,
        "reason": record.reason,
        "error": record.error,
        "streamed": record.streamed,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.total("num_generated"),
        "preemptions": record.total("num_preemptions"),
        "queue_ms": None if record.queue_seconds is None else round(1000 * record.queue_seconds, 2),
        "first_token_ms": milliseconds(record.earliest("first_token")),
        "total_ms": milliseconds(record.end_time),
        "key": record.key,
    }
    return {name: value for name, value in fields.items() if value is not None and value != ""}
