"""From HTTP requests to sequences in the engine, and from engine steps back to the requests that wait for them."""

from __future__ import annotations

import logging
import time
from asyncio import Event
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from aiakq.errors import AiakqError, error
from aiakq.runtime.messages import NOTHING_LEFT, EngineStats, ModelLimits, RequestSpec, StepOutput
from aiakq.runtime.output_processor import Delta, OutputProcessor
from aiakq.runtime.sampling import SamplingParams
from aiakq.runtime.server.engine_client import EngineClient, again
from aiakq.runtime.server.metrics import Metrics
from aiakq.runtime.server.wire import Cancel, Reset, Submit

logger = logging.getLogger("aiakq.server")

#: What one HTTP request may ask for at most.
MAX_PROMPTS = 32
MAX_SEQUENCES = 64


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenized. ``text`` is None when the client sent token ids."""

    text: str | None
    token_ids: list[int]


@dataclass
class _Progress:
    """One sequence as the metrics see it; times on the HTTP side's clock."""

    prompt_tokens: int
    max_tokens: int
    generated: int = 0
    first: float = 0.0
    last: float = 0.0


@dataclass
class _Part:
    """The sequences of one prompt.

    wanted  how many of them are delivered; the best, if there are more.
    held    what was generated so far, where only the best are delivered.
    """

    generation: Generation
    prompt_index: int
    sequences: list[_Progress]
    engine_ids: list[str]
    unfinished: int
    wanted: int
    held: dict[int, Delta] = field(default_factory=dict)


class Generation:
    """Everything one HTTP request generates; iterate over it once, then ``close`` it in any case.

    News that come faster than they are taken are merged per choice, so that a slow reader costs no more memory than
    its own answer.
    """

    def __init__(self, table: GenerationTable, arrived: float) -> None:
        self.arrived = arrived
        self.request_ids: list[str] = []
        self.unfinished = 0
        self.longest = 0
        self._table = table
        self._news: dict[tuple[int, int], Delta] = {}
        self._failure: AiakqError | None = None
        self._wake = Event()
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """Lists of (index of the prompt, news) until every sequence is finished. Raises what made it fail."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            news, self._news = self._news, {}
            failure, done = self._failure, self.unfinished == 0
            if news:
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
        self._wake.set()

    def fail(self, failure: AiakqError) -> None:
        """Make the reader raise ``failure``."""
        self._failure = failure
        self._wake.set()

    def close(self) -> None:
        """Stop whatever is still running for this request; harmless when nothing is."""
        if not self._closed:
            self._closed = True
            self._table.forget(self)


def merged(earlier: Delta, later: Delta) -> Delta:
    """Two consecutive pieces of news about one choice as one; ``earlier`` is modified and returned."""
    earlier.text += later.text
    earlier.token_ids = [*earlier.token_ids, *later.token_ids]
    if later.logprobs is not None:
        earlier.logprobs = [*(earlier.logprobs or []), *later.logprobs]
    if later.prompt_logprobs is not None:
        earlier.prompt_logprobs = later.prompt_logprobs
    for name in ("cumulative_logprob", "finish_reason", "stop_reason", "times", "num_preemptions", "error"):
        setattr(earlier, name, getattr(later, name))
    earlier.num_cached_tokens = max(earlier.num_cached_tokens, later.num_cached_tokens)
    return earlier


def _failure(reason: str) -> AiakqError:
    """What a client is told about a sequence that ended with an error."""
    if reason == NOTHING_LEFT:
        return error("nothing_left", reason=reason)
    return error("request_failed", reason=reason.rstrip("."))


class GenerationTable:
    """All running generations. The only place that sends sequences to the engine.

    stats   the engine's statistics after its last step.
    totals  prompt and output tokens since the start, for the line of statistics.
    """

    def __init__(
        self,
        engine: EngineClient,
        processor: OutputProcessor,
        limits: ModelLimits,
        metrics: Metrics,
        max_queued: int,
    ) -> None:
        self.stats = EngineStats(num_pages=0)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._engine = engine
        self._processor = processor
        self._limits = limits
        self._metrics = metrics
        self._max_queued = max_queued
        self._parts: dict[str, _Part] = {}
        self._part_ids: dict[str, str] = {}
        self._unstarted = 0
        self._failure: AiakqError | None = None

    @property
    def failure(self) -> AiakqError | None:
        """Why nothing can be generated any more; None while the engine lives."""
        return self._failure

    def start(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        arrived: float,
        priority: int = 0,
    ) -> Generation:
        """Admit a whole HTTP request and hand its sequences to the engine.

        Raises too_many_prompts, overloaded, engine_dead, and everything ``messages.admit`` raises; then nothing of the
        request was started.
        """
        if self._failure is not None:
            raise again(self._failure)
        wanted = len(prompts) * params.num_sequences
        if len(prompts) > MAX_PROMPTS:
            raise error("too_many_prompts", param="prompt", value=len(prompts), limit=MAX_PROMPTS)
        if wanted > MAX_SEQUENCES:
            param = "n" if params.num_sequences == params.n else "best_of"
            raise error("too_many_prompts", param=param, value=wanted, limit=MAX_SEQUENCES)
        if self._unstarted + wanted > self._max_queued:
            raise error("overloaded", waiting=self._unstarted, limit=self._max_queued)
        generation = Generation(self, arrived)
        specs: list[RequestSpec] = []
        try:
            for index, prompt in enumerate(prompts):
                part_id = f"{request_id}-{index}"
                parts = self._processor.add(part_id, prompt.token_ids, params, priority)
                generation.request_ids.append(part_id)
                sequences = [_Progress(len(prompt.token_ids), spec.max_tokens) for spec in parts]
                engine_ids = [spec.request_id for spec in parts]
                self._parts[part_id] = _Part(generation, index, sequences, engine_ids, len(parts), params.n)
                self._part_ids.update(dict.fromkeys(engine_ids, part_id))
                generation.unfinished += len(parts)
                self._unstarted += len(parts)
                specs += parts
        except AiakqError:
            self._drop(generation)
            raise
        self._metrics.params_n.observe(params.n)
        self._engine.send(Submit(specs))
        return generation

    def on_step(self, output: StepOutput) -> None:
        """Hand the news of one engine step to the requests they belong to."""
        now = time.monotonic()
        self.stats = output.stats
        self._metrics.step(output.stats)
        met_stop: list[str] = []
        for news in output.outputs:
            try:
                deltas, to_abort = self._processor.process(news)
            except BaseException as failure:  # the Rust tokenizer's panics are no Exceptions
                logger.exception("detokenizing %s failed", news.request_id, exc_info=failure)
                self._fail_one(news.request_id)
                continue
            met_stop += to_abort
            for delta in deltas:
                self._deliver(delta, now)
        if met_stop:
            self._engine.send(Cancel(met_stop))

    def on_engine_end(self, failure: AiakqError) -> None:
        """The engine is gone: fail what runs and refuse what comes."""
        self._failure = failure
        self._metrics.engine_ended()
        self.fail_all(failure)

    def fail_all(self, failure: AiakqError) -> None:
        """Fail every running generation; each then closes itself."""
        for part in list(self._parts.values()):
            part.generation.fail(failure)

    def abort(self, ids: Sequence[str] | None, failure: AiakqError) -> int:
        """Fail the running requests with these ids of answers, all of them for None; how many there were."""
        wanted = None if ids is None else set(ids)
        found = {
            id(part.generation): part.generation
            for part_id, part in self._parts.items()
            if wanted is None or part_id.rpartition("-")[0] in wanted
        }
        for generation in found.values():
            generation.fail(failure)
        return len(found)

    def reset_prefix_cache(self) -> None:
        """Let no later prompt reuse what was computed for earlier ones."""
        self._engine.send(Reset())

    def forget(self, generation: Generation) -> None:
        """The end of ``generation``: tell the engine to stop what is left of it."""
        self._metrics.longest_output.observe(generation.longest)
        unfinished = self._drop(generation)
        if unfinished:
            self._engine.send(Cancel(unfinished))

    def _drop(self, generation: Generation) -> list[str]:
        """Stop following ``generation``; returns the engine's ids of what is unfinished."""
        engine_ids: list[str] = []
        for part_id in generation.request_ids:
            part = self._remove(part_id)
            if part is not None:
                self._unstarted -= sum(not sequence.first for sequence in part.sequences)
                engine_ids += self._processor.cancel(part_id)
        return engine_ids

    def _remove(self, part_id: str) -> _Part | None:
        part = self._parts.pop(part_id, None)
        for engine_id in part.engine_ids if part else ():
            del self._part_ids[engine_id]
        return part

    def _fail_one(self, engine_id: str) -> None:
        """One sequence's text could not be made: fail its request, and nobody else's."""
        part = self._parts.get(self._part_ids.get(engine_id, ""))
        if part is not None:
            part.generation.fail(error("request_failed", reason="its tokens could not be turned into text"))

    def _deliver(self, delta: Delta, now: float) -> None:
        part = self._parts.get(delta.request_id)
        if part is None:  # closed in the same moment
            return
        sequence = part.sequences[delta.index]
        self._observe(part.generation, sequence, delta, now)
        if delta.finish_reason in ("error", "abort"):
            part.generation.fail(_failure(delta.error or "the engine stopped it"))
            return
        if delta.finish_reason is not None:
            part.unfinished -= 1
            part.generation.unfinished -= 1
            if part.unfinished == 0:
                self._remove(delta.request_id)
        if len(part.sequences) == part.wanted:
            part.generation.deliver(part.prompt_index, delta)
            return
        held = part.held.get(delta.index)
        part.held[delta.index] = delta if held is None else merged(held, delta)
        if part.unfinished == 0:
            ranked = sorted(part.held.values(), key=lambda one: -one.cumulative_logprob)
            for index, one in enumerate(ranked[: part.wanted]):
                part.generation.deliver(part.prompt_index, replace(one, index=index))

    def _observe(self, generation: Generation, sequence: _Progress, delta: Delta, now: float) -> None:
        """Bring the metrics up to date with one piece of news."""
        metrics = self._metrics
        if not sequence.first:
            self._unstarted -= 1
            self.prompt_tokens += sequence.prompt_tokens
            metrics.prompt_tokens.inc(sequence.prompt_tokens)
            metrics.cached_tokens.inc(delta.num_cached_tokens)
            if delta.token_ids:
                metrics.first_token.observe(now - generation.arrived)
            sequence.first = now
        elif delta.token_ids:
            metrics.gap.observe(now - sequence.last)
        count = len(delta.token_ids)
        sequence.last = now
        sequence.generated += count
        self.generation_tokens += count
        generation.longest = max(generation.longest, sequence.generated)
        metrics.generation_tokens.inc(count)
        if delta.finish_reason is None:
            return
        if sequence.generated > 1:
            for histogram in metrics.per_token:
                histogram.observe((sequence.last - sequence.first) / (sequence.generated - 1))
        metrics.sequence_ended(
            sequence.prompt_tokens, sequence.generated, sequence.max_tokens, delta.num_preemptions, delta.times
        )
