"""What completions and chat completions share."""

from __future__ import annotations

import math

from aiakq.runtime.engine.messages import RequestTimes
from aiakq.runtime.text.outputs import Logprob
from aiakq.server.api.openai import LOWEST_LOGPROB, RequestTimings, finite, top_by_rank


def test_infinite_logprobs_can_be_encoded_as_json():
    assert finite(-math.inf) == finite(math.nan) == LOWEST_LOGPROB and finite(-3.0) == -3.0
    position = {9: Logprob(-5.0, 30), 1: Logprob(-0.5, 1), 2: Logprob(-0.7, 2)}
    assert [token for token, _ in top_by_rank(position, 2)] == [1, 2]
    assert top_by_rank(position, 0) == []


def test_timings_are_those_between_the_engine_s_times():
    timings = RequestTimings.of(RequestTimes(arrived=1.0, scheduled=1.5, first_token=2.0, last_token=4.0), 5)
    assert (timings.queue_time_ms, timings.time_to_first_token_ms, timings.generation_time_ms) == (500, 500, 2000)
    assert (timings.mean_itl_ms, timings.tokens_per_second) == (500, 2.0)
    assert RequestTimings.of(RequestTimes(arrived=1.0, scheduled=1.5), 0).time_to_first_token_ms is None
    assert RequestTimings.of(None, 0) == RequestTimings()
    one = RequestTimings.of(RequestTimes(arrived=1.0, scheduled=1.5, first_token=2.0, last_token=2.0), 1)
    assert one.mean_itl_ms is None and one.tokens_per_second == 2.0
