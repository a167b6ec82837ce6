"""The times of one request in its response, with --enable-per-request-metrics."""

from __future__ import annotations

import msgspec

from aiakq.runtime.protocol.output import RequestTimes


class RequestTimings(msgspec.Struct):
    """Times of a request with one sequence, as vLLM defines them; absent where there was no such phase.

    time_to_first_token_ms  from the first step to the first token.
    generation_time_ms      from the first token to the last.
    queue_time_ms           from the arrival in the engine to the first step.
    mean_itl_ms             mean time between two tokens.
    tokens_per_second       generated tokens per second from the first step to the last token.
    """

    time_to_first_token_ms: float | msgspec.UnsetType = msgspec.UNSET
    generation_time_ms: float | msgspec.UnsetType = msgspec.UNSET
    queue_time_ms: float | msgspec.UnsetType = msgspec.UNSET
    mean_itl_ms: float | msgspec.UnsetType = msgspec.UNSET
    tokens_per_second: float | msgspec.UnsetType = msgspec.UNSET

    @staticmethod
    def of(times: RequestTimes | None, num_tokens: int) -> RequestTimings:
        """Return the timings for the engine's times."""
        timings = RequestTimings()
        if times is None or times.scheduled is None:
            return timings
        timings.queue_time_ms = 1000 * (times.scheduled - times.arrived)
        if times.first_token is None or times.last_token is None:
            return timings
        timings.time_to_first_token_ms = 1000 * (times.first_token - times.scheduled)
        generation_time_ms = timings.generation_time_ms = 1000 * (times.last_token - times.first_token)
        if num_tokens > 1:
            timings.mean_itl_ms = generation_time_ms / (num_tokens - 1)
        if times.last_token > times.scheduled:
            timings.tokens_per_second = num_tokens / (times.last_token - times.scheduled)
        return timings
