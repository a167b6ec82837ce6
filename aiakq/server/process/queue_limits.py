"""QueueLimits: how many requests may wait for an engine, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiakq.errors import error
from aiakq.runtime.protocol.request import Prompt
from aiakq.runtime.protocol.sampling_params import SamplingParams


@dataclass(frozen=True)
class QueueLimits:
    """Limits on waiting and running requests.

    max_running          maximum number of running sequences.
    max_waiting          maximum number of waiting sequences.
    max_waiting_tokens   maximum number of prompt tokens of all waiting sequences.
    max_wait_seconds     maximum time from the arrival of a request to its first step.
    max_request_seconds  maximum time from the arrival of a request to its end.
    """

    max_running: int
    max_waiting: int
    max_waiting_tokens: int
    max_wait_seconds: float
    max_request_seconds: float

    def check(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        num_unfinished: int,
        num_waiting: int,
        num_waiting_tokens: int,
    ) -> None:
        """Raise ``overloaded`` if the queue has no room for a request.

        num_unfinished, num_waiting  sequences that have not ended, and those of them that have not started.
        num_waiting_tokens           prompt tokens of the latter.
        """
        if num_unfinished + len(prompts) * params.num_sequences > self.max_running + self.max_waiting:
            flag, limit = "--max-num-queued-reqs", self.max_waiting
            raise error("overloaded", waiting=num_waiting, what="sequences", limit=limit, flag=flag)
        num_tokens = params.num_sequences * sum(len(prompt.token_ids) for prompt in prompts)
        if num_waiting and num_waiting_tokens + num_tokens > self.max_waiting_tokens:
            flag, limit = "--max-num-queued-tokens", self.max_waiting_tokens
            raise error("overloaded", waiting=num_waiting_tokens, what="prompt tokens", limit=limit, flag=flag)
