"""What one HTTP request generates: its prompts, its news on the way to the reader, and how far each sequence is."""

from __future__ import annotations

from asyncio import Event
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiakq.errors import AiakqError, error
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.process.engine_client import again

if TYPE_CHECKING:
    from aiakq.server.api.request_manager import GenerationTable

#: What one HTTP request may ask for at most.
MAX_PROMPTS = 32
MAX_SEQUENCES = 64
#: Bytes of news a reader may leave lying before its request is given up; what an entry of log-probabilities takes.
MAX_UNREAD = 1 << 20
_TOKEN_BYTES, _LOGPROB_BYTES = 16, 64


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenized. ``text`` is None when the client sent token ids."""

    text: str | None
    token_ids: list[int]


@dataclass
class Progress:
    """One sequence as queue and metrics see it; times on the HTTP side's clock.

    counted  the most tokens it ever had: what a second engine repeats is not counted again.
    """

    prompt_tokens: int
    max_tokens: int
    scheduled: bool = False
    finished: bool = False
    generated: int = 0
    counted: int = 0
    first: float = 0.0
    last: float = 0.0

    def restart(self) -> None:
        """Forget what the engine did."""
        self.scheduled = self.finished = False
        self.generated = 0


def check_count(prompts: int, params: SamplingParams) -> None:
    """Raise ``too_many_prompts`` for more prompts or sequences than one request may ask for."""
    if prompts > MAX_PROMPTS:
        raise error("too_many_prompts", param="prompt", value=prompts, limit=MAX_PROMPTS)
    wanted = prompts * params.num_sequences
    if wanted > MAX_SEQUENCES:
        param = "n" if params.num_sequences == params.n else "best_of"
        raise error("too_many_prompts", param=param, value=wanted, limit=MAX_SEQUENCES)


class Generation:
    """Everything one HTTP request generates; iterate over it once, then ``close`` it in any case.

    whole     the reader wants everything at the end, not news on the way.
    taken     whether the reader has any news; until then it can be generated anew unnoticed.
    deaths    engines that ended while it ran.
    restarting  whether it waits for another engine, to be generated anew.

    News that come faster than they are taken are merged per choice. A reader that leaves more than ``MAX_UNREAD`` bytes
    lying loses the request, so that it costs others neither memory nor pages.
    """

    def __init__(
        self,
        table: GenerationTable,
        id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        arrived: float,
        whole: bool,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        self.id = id
        self.prompts = prompts
        self.params = params
        self.arrived = arrived
        self.whole = whole
        self.priority = priority
        self.cache_salt = cache_salt
        self.sequences: list[list[Progress]] = [[] for _ in prompts]
        self.unfinished = 0
        self.longest = 0
        self.taken = False
        self.deaths = 0
        self.restarting = False
        self._table = table
        self._news: dict[tuple[int, int], Delta] = {}
        self._unread = 0
        self._failure: AiakqError | None = None
        self._wake = Event()
        self._closed = False

    @property
    def part_ids(self) -> list[str]:
        """What the prompts are called between here and the output processor."""
        return [f"{self.id}-{index}" for index in range(len(self.prompts))]

    @property
    def is_waiting(self) -> bool:
        """Whether no sequence of it has been in a step yet."""
        return not any(sequence.scheduled for part in self.sequences for sequence in part)

    @property
    def is_complete(self) -> bool:
        """Whether every sequence is finished, whatever the reader has taken of it."""
        return self.unfinished == 0 and not self.restarting

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Lists of (index of the prompt, news) until every sequence is finished. Raises what made it fail."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            news, self._news, self._unread = self._news, {}, 0
            failure, done = self._failure, self.is_complete
            if news and (done or not self.whole):
                self.taken = True
                yield [(prompt_index, delta) for (prompt_index, _), delta in news.items()]
            # What came before the failure was told first, however soon after it the failure came.
            if failure is not None:
                raise again(failure)
            if done:
                return

    def deliver(self, prompt_index: int, delta: Delta) -> None:
        """Take news from the engine."""
        key = (prompt_index, delta.index)
        waiting = self._news.get(key)
        self._news[key] = delta if waiting is None else merged(waiting, delta)
        if not self.whole or self.is_complete:
            self._wake.set()
        if not self.whole:
            self._unread += size_of(delta)
            if self._unread > MAX_UNREAD:
                self.fail(error("slow_reader", limit=MAX_UNREAD))

    def fail(self, failure: AiakqError) -> None:
        """Stop the work for it and make the reader raise ``failure``."""
        self._failure = failure
        self._wake.set()
        self.close()

    def restart(self) -> None:
        """Forget all news: it is generated anew."""
        assert not self.taken
        self._news.clear()
        self.unfinished = 0
        self.restarting = True
        for part in self.sequences:
            for sequence in part:
                sequence.restart()

    def close(self) -> None:
        """Stop whatever is still running for this request; harmless when nothing is."""
        if not self._closed:
            self._closed = True
            self._table.forget(self)


def size_of(delta: Delta) -> int:
    """About how many bytes ``delta`` takes in an answer."""
    logprobs = sum(map(len, delta.logprobs or ()))
    return len(delta.text) + _TOKEN_BYTES * len(delta.token_ids) + _LOGPROB_BYTES * logprobs


def merged(earlier: Delta, later: Delta) -> Delta:
    """Two consecutive pieces of news about one choice as one; ``earlier`` is modified and returned."""
    earlier.text += later.text
    earlier.token_ids += later.token_ids
    if later.logprobs is not None:
        earlier.logprobs = earlier.logprobs or []
        earlier.logprobs += later.logprobs
    if later.prompt_logprobs is not None:
        earlier.prompt_logprobs = later.prompt_logprobs
    for name in ("cumulative_logprob", "finish_reason", "stop_reason", "times", "num_preemptions", "error"):
        setattr(earlier, name, getattr(later, name))
    earlier.num_cached_tokens = max(earlier.num_cached_tokens, later.num_cached_tokens)
    return earlier
