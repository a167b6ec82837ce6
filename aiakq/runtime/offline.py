"""Builders of the results of ``LLM``."""

from __future__ import annotations

from typing import Protocol, TypeVar

from aiakq.runtime.protocol.request import Request
from aiakq.runtime.protocol.request_output import CompletionOutput, RequestMetrics, RequestOutput
from aiakq.runtime.text.output_processor import Delta

Result_co = TypeVar("Result_co", covariant=True)


class OutputBuilder(Protocol[Result_co]):
    """Builds what a request of one prompt returns."""

    def add(self, delta: Delta) -> bool:
        """Add new output; return whether the request is finished."""

    def result(self) -> Result_co:
        """Return the result of the finished request."""


class RequestOutputBuilder:
    """Builds the ``RequestOutput`` of a request that generates tokens."""

    def __init__(self, request: Request) -> None:
        [prompt], params = request.prompts, request.params
        self._num_returned = params.n
        outputs = [
            CompletionOutput(index, "", [], 0.0, None if params.logprobs is None else [])
            for index in range(params.num_sequences)
        ]
        self._result = RequestOutput(request.id, prompt.text, prompt.token_ids, outputs, finished=False)

    def add(self, delta: Delta) -> bool:
        """See OutputBuilder."""
        result = self._result
        output = result.outputs[delta.index]
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.cumulative_logprob = delta.cumulative_logprob
        if delta.logprobs is not None and output.logprobs is not None:
            output.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            result.prompt_logprobs = list(delta.prompt_logprobs)
        result.num_cached_tokens = max(result.num_cached_tokens, delta.num_cached_tokens)
        result.error = delta.error or result.error
        if delta.finish_reason is not None:
            output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
            result.finished = all(other.finished() for other in result.outputs)
        if delta.times is not None:
            times = delta.times
            result.metrics = RequestMetrics(
                arrival_time=times.arrived,
                first_scheduled_time=times.scheduled,
                first_token_time=times.first_token,
                last_token_time=times.last_token,
                finished_time=times.last_token if result.finished else None,
                num_preemptions=delta.num_preemptions,
            )
        return result.finished

    def result(self) -> RequestOutput:
        """Return the result, with the ``n`` most likely sequences if more were generated."""
        result = self._result
        if len(result.outputs) > self._num_returned:
            best = sorted(result.outputs, key=lambda output: -output.cumulative_logprob)[: self._num_returned]
            for index, output in enumerate(best):
                output.index = index
            result.outputs = best
        return result
