"""The output of one request on its way to the reader."""

from __future__ import annotations

from aiakq.runtime.text.output_processor import Delta
from aiakq.runtime.text.outputs import Logprob
from aiakq.server.process.request_stream import merge_deltas


def test_deltas_are_merged_in_order():
    first = Delta("r", 0, "a", [1], [{1: Logprob(-1.0, 1)}], -1.0, num_cached_tokens=16, prompt_logprobs=[None])
    second = Delta("r", 0, "b", [2], [{2: Logprob(-2.0, 1)}], -3.0, "stop", "x", num_cached_tokens=16)
    both = merge_deltas(first, second)
    assert (both.text, both.token_ids, both.cumulative_logprob) == ("ab", [1, 2], -3.0)
    assert both.logprobs == [{1: Logprob(-1.0, 1)}, {2: Logprob(-2.0, 1)}]
    assert (both.finish_reason, both.stop_reason, both.prompt_logprobs) == ("stop", "x", [None])
