"""RequestStream: an HTTP request with the state of its sequences and its pending output."""

from __future__ import annotations

import itertools
from asyncio import Event
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.output import RequestTimes
from aiakq.runtime.protocol.request import Prompt, Request
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.errors import copy_error
from aiakq.server.telemetry.logs import OutputLog

#: Maximum numbers of prompts and sequences of one HTTP request.
MAX_PROMPTS = 32
MAX_SEQUENCES = 128
#: Maximum number of prompt log-probabilities in one response.
MAX_PROMPT_LOGPROBS = 1 << 20
#: Maximum bytes of unread output, estimated by ``estimate_size``, before the request of a slow reader is aborted.
MAX_UNREAD_BYTES = 1 << 20
_TOKEN_BYTES, _LOGPROB_BYTES = 16, 64

_NUMBERS = itertools.count()

#: New output of one request, as pairs (index of the prompt, delta of one of its sequences).
RequestDeltas = list[tuple[int, Delta]]


@dataclass
class SequenceProgress:
    """Progress of a sequence, for the queue and the metrics. Times are on the HTTP process's monotonic clock.

    times        timestamps of the engine, once the sequence is finished.
    num_counted  number of tokens already counted by the metrics, so that tokens regenerated after a restart of the
                 engine are not counted twice.
    """

    num_prompt_tokens: int
    max_tokens: int
    scheduled: bool = False
    finished: bool = False
    num_generated: int = 0
    num_counted: int = 0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    times: RequestTimes | None = None

    def reset(self) -> None:
        """Reset the progress, to restart on a new engine."""
        self.scheduled = self.finished = False
        self.num_generated = 0


def check_sequence_count(num_prompts: int, params: SamplingParams) -> None:
    """Raise ``too_many_prompts`` if a request exceeds ``MAX_PROMPTS`` or ``MAX_SEQUENCES``."""
    if num_prompts > MAX_PROMPTS:
        raise error("too_many_prompts", param="prompt", value=num_prompts, limit=MAX_PROMPTS)
    num_sequences = num_prompts * params.num_sequences
    if num_sequences > MAX_SEQUENCES:
        param = "n" if params.num_sequences == params.n else "best_of"
        raise error("too_many_prompts", param=param, value=num_sequences, limit=MAX_SEQUENCES)


def check_prompt_logprobs(prompts: Sequence[Prompt], params: SamplingParams, vocab_size: int) -> None:
    """Raise ``value_out_of_range`` if a request would return too many prompt log-probabilities."""
    if params.prompt_logprobs is None:
        return
    count = vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
    num_positions = params.num_sequences * sum(len(prompt.token_ids) for prompt in prompts)
    if num_positions * (1 + count) > MAX_PROMPT_LOGPROBS:
        allowed = f"at most {max(0, MAX_PROMPT_LOGPROBS // num_positions - 1)} for {num_positions} positions of prompts"
        raise error("value_out_of_range", param="prompt_logprobs", value=params.prompt_logprobs, allowed=allowed)


class RequestStream:
    """The output of one HTTP request. Iterate over it once, and always ``close`` it.

    request          what was asked for.
    key              its id in the engine, unique even if clients choose equal request ids.
    on_close         called once when the request is finished, failed or abandoned.
    consumed         whether the reader has received any output; until then the request can be restarted.
    num_engine_ends  number of engines that ended while the request was running.
    restarting       whether the request waits for a new engine to restart it.

    Output that arrives faster than it is read is merged per sequence. If more than ``MAX_UNREAD_BYTES`` accumulate, the
    request is aborted, so that a slow reader costs others neither memory nor pages.
    """

    def __init__(self, request: Request, on_close: Callable[[RequestStream], None]) -> None:
        self.request = request
        self.key = f"{request.id}-{next(_NUMBERS)}"
        self.sequences: list[list[SequenceProgress]] = [[] for _ in request.prompts]
        self.num_unfinished = 0
        self.max_generated = 0
        self.consumed = False
        self.num_engine_ends = 0
        self.restarting = False
        self.failure: AiakqError | None = None
        self.interval = 1  # tokens of a sequence per output, except the first and the last
        self.output_log: OutputLog | None = None
        self._on_close = on_close
        self._unread: dict[tuple[int, int], Delta] = {}
        self._num_unread_bytes = 0
        self._wake = Event()
        self._closed = False

    @property
    def prompt_ids(self) -> list[str]:
        """Ids of the prompts in the output processor, unique like ``key``."""
        return [f"{self.key}-{index}" for index in range(len(self.request.prompts))]

    @property
    def is_waiting(self) -> bool:
        """Whether none of its sequences has been scheduled yet."""
        return not any(sequence.scheduled for group in self.sequences for sequence in group)

    @property
    def is_complete(self) -> bool:
        """Whether every sequence is finished, read or not."""
        return self.num_unfinished == 0 and not self.restarting

    async def __aiter__(self) -> AsyncIterator[RequestDeltas]:
        """Yield new output until every sequence is finished. Raises the error that the request failed with."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            unread, self._unread, self._num_unread_bytes = self._unread, {}, 0
            failure, complete = self.failure, self.is_complete
            if unread and (complete or not self.request.final_only):
                self.consumed = True
                yield [(prompt_index, delta) for (prompt_index, _), delta in unread.items()]
            # Output from before the failure is delivered first.
            if failure is not None:
                raise copy_error(failure)
            if complete:
                return

    def put(self, prompt_index: int, delta: Delta) -> None:
        """Add output from the engine."""
        key = (prompt_index, delta.index)
        waiting = self._unread.get(key)
        if self.output_log is not None:
            self.output_log.put(prompt_index, delta)
        self._unread[key] = delta if waiting is None else merge_deltas(waiting, delta)
        if self.is_complete or not (self.request.final_only or self._is_early(self._unread[key])):
            self._wake.set()
        if not self.request.final_only:
            self._num_unread_bytes += estimate_size(delta)
            if self._num_unread_bytes > MAX_UNREAD_BYTES:
                self.fail(error("slow_reader", limit=MAX_UNREAD_BYTES))

    def _is_early(self, delta: Delta) -> bool:
        """Whether unread output waits for more tokens of its sequence, with --stream-interval."""
        if self.interval == 1 or not self.consumed or delta.finish_reason is not None:
            return False
        return len(delta.token_ids) < self.interval

    def fail(self, failure: AiakqError) -> None:
        """Abort the request and raise ``failure`` to the reader."""
        self.failure = failure
        self._wake.set()
        self.close()

    def restart(self, with_new_ids: bool = False) -> None:
        """Discard all output, to restart on a new engine. Only possible while the reader has received nothing.

        with_new_ids  whether to restart on the same engine, which may still report on the present ids.
        """
        assert not self.consumed
        if with_new_ids:
            self.key = f"{self.request.id}-{next(_NUMBERS)}"
        self._unread.clear()
        if self.output_log is not None:
            self.output_log.clear()
        self.num_unfinished = 0
        self.restarting = True
        for group in self.sequences:
            for sequence in group:
                sequence.reset()

    def use_adapter(self, adapter: AdapterRef | None) -> None:
        """Replace the adapter, before the request is restarted."""
        options = msgspec.structs.replace(self.request.options, adapter=adapter)
        self.request = replace(self.request, options=options)

    def move(self, on_close: Callable[[RequestStream], None]) -> None:
        """Move the request to another engine, whose manager gets ``on_close``."""
        self._on_close = on_close

    def close(self) -> None:
        """Abort all unfinished sequences of the request. Later calls do nothing."""
        if not self._closed:
            self._closed = True
            self._on_close(self)


def estimate_size(delta: Delta) -> int:
    """Return the approximate size in bytes of ``delta`` in a response."""
    num_logprobs = sum(map(len, delta.logprobs or ()))
    return len(delta.text) + _TOKEN_BYTES * len(delta.token_ids) + _LOGPROB_BYTES * num_logprobs


def merge_deltas(earlier: Delta, later: Delta) -> Delta:
    """Merge two consecutive deltas of a sequence into ``earlier``, and return it."""
    earlier.text += later.text
    earlier.token_ids += later.token_ids
    if later.logprobs is not None:
        earlier.logprobs = earlier.logprobs or []
        earlier.logprobs += later.logprobs
    if later.prompt_logprobs is not None:
        earlier.prompt_logprobs = later.prompt_logprobs
    for name in ("cumulative_logprob", "finish_reason", "stop_reason", "times", "num_preemptions", "error"):
        setattr(earlier, name, getattr(later, name))
    earlier.pooled = later.pooled or earlier.pooled
    earlier.num_cached_tokens = max(earlier.num_cached_tokens, later.num_cached_tokens)
    return earlier
