"""The times that responses have are computed from the engine's."""

from __future__ import annotations

from msgspec import UNSET

from aiakq.runtime.protocol.output import RequestTimes
from aiakq.server.api.request_timings import RequestTimings


def test_timings_are_those_between_the_engine_s_times():
    timings = RequestTimings.of(RequestTimes(arrived=1.0, scheduled=1.5, first_token=2.0, last_token=4.0), 5)
    assert (timings.queue_time_ms, timings.time_to_first_token_ms, timings.generation_time_ms) == (500, 500, 2000)
    assert (timings.mean_itl_ms, timings.tokens_per_second) == (500, 2.0)
    assert RequestTimings.of(RequestTimes(arrived=1.0, scheduled=1.5), 0).time_to_first_token_ms is UNSET
    assert RequestTimings.of(None, 0) == RequestTimings()
    one = RequestTimings.of(RequestTimes(arrived=1.0, scheduled=1.5, first_token=2.0, last_token=2.0), 1)
    assert one.mean_itl_ms is UNSET and one.tokens_per_second == 2.0
