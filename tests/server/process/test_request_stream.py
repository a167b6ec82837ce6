"""The output stream of one request."""

from __future__ import annotations

import asyncio

from aiakq.runtime.protocol.request import Prompt, Request
from aiakq.runtime.protocol.request_output import Logprob
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.process.request_stream import RequestStream, SequenceProgress, merge_deltas


def test_deltas_are_merged_in_order():
    first = Delta("r", 0, "a", [1], [{1: Logprob(-1.0, 1)}], -1.0, num_cached_tokens=16, prompt_logprobs=[None])
    second = Delta("r", 0, "b", [2], [{2: Logprob(-2.0, 1)}], -3.0, "stop", "x", num_cached_tokens=16)
    both = merge_deltas(first, second)
    assert (both.text, both.token_ids, both.cumulative_logprob) == ("ab", [1, 2], -3.0)
    assert both.logprobs == [{1: Logprob(-1.0, 1)}, {2: Logprob(-2.0, 1)}]
    assert (both.finish_reason, both.stop_reason, both.prompt_logprobs) == ("stop", "x", [None])


def stream_of(num_tokens: int, interval: int) -> list[list[int]]:
    """Put tokens into a stream one by one, read whenever it wakes, and return the tokens of each output."""
    progress = SequenceProgress(1, 8)
    stream = RequestStream(Request("r", [Prompt(None, [1])], SamplingParams()), lambda stream: None)
    stream.interval, stream.num_unfinished, stream.sequences = interval, 1, [[progress]]

    async def run() -> list[list[int]]:
        outputs: list[list[int]] = []

        async def read() -> None:
            async for deltas in stream:
                outputs.append([token for _, delta in deltas for token in delta.token_ids])

        reading = asyncio.create_task(read())
        for number in range(num_tokens):
            last = number + 1 == num_tokens
            stream.num_unfinished = 0 if last else 1
            stream.put(0, Delta("r", 0, "x", [number], None, 0.0, "stop" if last else None))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await reading
        return outputs

    return asyncio.run(run())


def test_a_stream_interval_joins_tokens_after_the_first():
    assert stream_of(4, 1) == [[0], [1], [2], [3]]
    assert stream_of(8, 3) == [[0], [1, 2, 3], [4, 5, 6], [7]]
    assert stream_of(1, 3) == [[0]]
