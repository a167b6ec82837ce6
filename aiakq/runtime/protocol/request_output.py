"""RequestOutput and CompletionOutput, with the fields of vLLM's classes."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiakq.runtime.protocol.pooling_params import Pooled


@dataclass
class Logprob:
    """One token's natural-log probability, from the logits before temperature and penalties.

    rank           1 for the most likely token of the vocabulary.
    decoded_token  its text, or None when the request is not detokenized.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: Log-probabilities at a position: token id -> Logprob, for the sampled token and the most likely ones.
PositionLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One generated sequence.

    cumulative_logprob  sum over the generated tokens; always filled.
    finish_reason       "stop", "length", "abort" or "error"; None while it runs.
    stop_reason         the stop string or stop token id that ended it; None for an EOS token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Timestamps of a request in seconds on the engine's clock; None for events that have not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """A prompt and everything generated for it so far; for pooling models, the ``pooled`` prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = field(default=None)
    pooled: Pooled | None = field(default=None, repr=False)
