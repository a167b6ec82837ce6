"""All running generations: the bounded queue in front of the engine, and the way of its news to those who wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from aiakq.errors import AiakqError, error
from aiakq.runtime.engine.messages import NOTHING_LEFT, OUT_OF_MEMORY, EngineStats, ModelLimits, RequestSpec, StepOutput
from aiakq.runtime.sampling_params import SamplingParams
from aiakq.runtime.text.output_processor import Delta, OutputProcessor
from aiakq.server.api.request_stream import Generation, Progress, Prompt, check_count, merged
from aiakq.server.process.engine_client import again
from aiakq.server.process.ipc import Cancel, Reset, Submit, ToEngine
from aiakq.server.telemetry.metrics import Metrics

logger = logging.getLogger("aiakq.server")


@dataclass(frozen=True)
class QueueLimits:
    """How much may wait, and for how long.

    batch            sequences the engine runs at a time.
    sequences        sequences that may wait beside them.
    tokens           prompt tokens of all that wait.
    wait_seconds     from a request's arrival to its first step.
    request_seconds  from its arrival to its end.
    """

    batch: int
    sequences: int
    tokens: int
    wait_seconds: float
    request_seconds: float


@dataclass
class _Part:
    """The sequences of one prompt, by the engine's ids.

    wanted  how many of them are delivered; the best, if there are more.
    held    what was generated so far, where only the best are delivered.
    """

    generation: Generation
    prompt_index: int
    sequences: dict[str, Progress]
    unfinished: int
    wanted: int
    held: dict[int, Delta] = field(default_factory=dict)


class GenerationTable:
    """All running generations. The only place that sends sequences to the engine.

    stats    the engine's statistics after its last step.
    failure  why nothing can be generated now; None while the engine lives.
    busy     sequences the engine has not finished; with any, it has to make steps.
    """

    def __init__(self, processor: OutputProcessor, limits: ModelLimits, metrics: Metrics, queue: QueueLimits) -> None:
        self.stats = EngineStats(num_pages=0)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.failure: AiakqError | None = error("loading")
        self.busy = 0
        self._processor = processor
        self._limits = limits
        self._metrics = metrics
        self._queue = queue
        self._send: Callable[[ToEngine], None] = _to_nobody
        self._generations: dict[Generation, None] = {}
        self._parts: dict[str, _Part] = {}
        self._part_of: dict[str, _Part] = {}
        self._waiting = 0
        self._waiting_tokens = 0
        self._had_engine = False

    # --- requests

    def start(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        arrived: float,
        whole: bool = False,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Generation:
        """Admit a whole HTTP request and hand its sequences to the engine.

        Raises too_many_prompts, overloaded, ``failure``, and everything ``messages.admit`` raises; then nothing of the
        request was started.
        """
        if self.failure is not None:
            raise again(self.failure)
        check_count(len(prompts), params)
        self._check_queue(prompts, params)
        generation = Generation(self, request_id, prompts, params, arrived, whole, priority, cache_salt)
        specs = self._add(generation)
        self._generations[generation] = None
        self._metrics.params_n.observe(params.n)
        self._send(Submit(specs))
        return generation

    def forget(self, generation: Generation) -> None:
        """The end of ``generation``: tell the engine to stop what is left of it."""
        self._generations.pop(generation, None)
        self._metrics.longest_output.observe(generation.longest)
        unfinished = self._drop(generation)
        if unfinished:
            self._send(Cancel(unfinished))

    def expire(self, now: float) -> None:
        """Fail what has waited or run for too long; ``now`` as of ``time.monotonic``."""
        queue = self._queue
        for generation in list(self._generations):
            age = now - generation.arrived
            if age > queue.request_seconds:
                generation.fail(error("time_limit", limit=queue.request_seconds))
            elif age > queue.wait_seconds and generation.is_waiting:
                generation.fail(error("queue_timeout", limit=queue.wait_seconds))

    def fail_all(self, failure: AiakqError) -> None:
        """Fail every running generation."""
        for generation in list(self._generations):
            generation.fail(failure)

    def abort(self, ids: Sequence[str] | None, failure: AiakqError) -> int:
        """Fail the running requests with these ids of answers, all of them for None; how many there were."""
        found = [one for one in self._generations if ids is None or one.id in ids]
        for generation in found:
            generation.fail(failure)
        return len(found)

    def reset_prefix_cache(self) -> None:
        """Let no later prompt reuse what was computed for earlier ones."""
        self._send(Reset())

    def _check_queue(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        queue, n = self._queue, params.num_sequences
        wanted = len(prompts) * n
        if self.busy + wanted > queue.batch + queue.sequences:
            flag, limit = "--max-num-queued-reqs", queue.sequences
            raise error("overloaded", waiting=self._waiting, what="sequences", limit=limit, flag=flag)
        tokens = n * sum(len(prompt.token_ids) for prompt in prompts)
        if self._waiting and self._waiting_tokens + tokens > queue.tokens:
            flag, limit = "--max-num-queued-tokens", queue.tokens
            raise error("overloaded", waiting=self._waiting_tokens, what="prompt tokens", limit=limit, flag=flag)

    def _add(self, generation: Generation) -> list[RequestSpec]:
        """Follow ``generation`` from its beginning; returns what to give the engine."""
        specs: list[RequestSpec] = []
        try:
            for index, (part_id, prompt) in enumerate(zip(generation.part_ids, generation.prompts, strict=True)):
                parts = self._processor.add(
                    part_id, prompt.token_ids, generation.params, generation.priority, generation.cache_salt
                )
                progress = generation.sequences[index]
                if not progress:
                    progress += [Progress(len(prompt.token_ids), spec.max_tokens) for spec in parts]
                sequences = {spec.request_id: one for spec, one in zip(parts, progress, strict=True)}
                part = _Part(generation, index, sequences, len(parts), generation.params.n)
                self._parts[part_id] = part
                self._part_of.update(dict.fromkeys(sequences, part))
                generation.unfinished += len(parts)
                generation.restarting = False
                self.busy += len(parts)
                self._waiting += len(parts)
                self._waiting_tokens += len(prompt.token_ids) * len(parts)
                specs += parts
        except AiakqError:
            self._drop(generation)
            raise
        return specs

    def _drop(self, generation: Generation) -> list[str]:
        """Stop following ``generation``; returns the engine's ids of what is unfinished."""
        engine_ids: list[str] = []
        for part_id in generation.part_ids:
            part = self._remove(part_id)
            if part is not None:
                for sequence in part.sequences.values():
                    self._leave_queue(sequence)
                    self.busy -= not sequence.finished
                engine_ids += self._processor.cancel(part_id)
        return engine_ids

    def _remove(self, part_id: str) -> _Part | None:
        part = self._parts.pop(part_id, None)
        for engine_id in part.sequences if part else ():
            del self._part_of[engine_id]
        return part

    def _leave_queue(self, sequence: Progress) -> None:
        if not sequence.scheduled:
            sequence.scheduled = True
            self._waiting -= 1
            self._waiting_tokens -= sequence.prompt_tokens

    # --- the engine

    def on_engine_ready(self, send: Callable[[ToEngine], None], limits: ModelLimits) -> None:
        """An engine takes requests from now on; it gets those that were left by the one before it."""
        if self._had_engine:
            self._metrics.restarts.inc()
        self._had_engine = True
        self.failure = None
        self._send = send
        self._limits = self._processor.limits = limits
        for generation in list(self._generations):
            if generation.is_complete:
                continue
            try:
                specs = self._add(generation)
            except AiakqError as failure:  # a smaller page pool than before
                generation.fail(failure)
            else:
                send(Submit(specs))

    def on_engine_end(self, told: AiakqError, until_ready: AiakqError, *, replay: bool) -> None:
        """The engine is gone.

        told         what those learn whose answer is cut.
        until_ready  what new requests learn until ``on_engine_ready``.
        replay       keep the requests whose readers have nothing yet for the next engine; one that was in the steps of
                     two engines that ended may be why, and is not given to a third.
        """
        self.failure = until_ready
        self._send = _to_nobody
        self._metrics.engine_ended()
        self.stats = EngineStats(num_pages=0)
        for generation in list(self._generations):
            if generation.is_complete:  # it only has to be read
                continue
            generation.deaths += not generation.is_waiting
            if replay and not generation.taken and generation.deaths < 2:
                self._drop(generation)
                generation.restart()
            else:
                quarantined = generation.deaths >= 2 and not generation.taken
                generation.fail(error("request_quarantined") if quarantined else told)

    def on_step(self, output: StepOutput) -> None:
        """Hand the news of one engine step to the requests they belong to."""
        now = time.monotonic()
        self.stats = output.stats
        self._metrics.step(output.stats)
        for engine_id in output.started:
            part = self._part_of.get(engine_id)
            if part is not None:
                self._leave_queue(part.sequences[engine_id])
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
                self._deliver(news.request_id, delta, now)
        if met_stop:
            self._send(Cancel(met_stop))

    def _fail_one(self, engine_id: str) -> None:
        """One sequence's text could not be made: fail its request, and nobody else's."""
        part = self._part_of.get(engine_id)
        if part is not None:
            part.generation.fail(error("request_failed", reason="its tokens could not be turned into text"))

    def _deliver(self, engine_id: str, delta: Delta, now: float) -> None:
        part = self._part_of.get(engine_id)
        if part is None:  # closed in the same moment
            return
        sequence = part.sequences[engine_id]
        self._observe(part.generation, sequence, delta, now)
        if delta.finish_reason == "error":
            part.generation.fail(_failure(delta.error or "no reason is known"))
            return
        if delta.finish_reason == "abort":
            part.generation.fail(error("request_failed", reason="the engine stopped it"))
            return
        if delta.finish_reason is not None:
            sequence.finished = True
            self.busy -= 1
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

    def _observe(self, generation: Generation, sequence: Progress, delta: Delta, now: float) -> None:
        """Bring the metrics up to date with one piece of news."""
        metrics = self._metrics
        sequence.generated += len(delta.token_ids)
        fresh = sequence.generated - sequence.counted
        if not sequence.first:
            self.prompt_tokens += sequence.prompt_tokens
            metrics.prompt_tokens.inc(sequence.prompt_tokens)
            metrics.cached_tokens.inc(delta.num_cached_tokens)
            if delta.token_ids:
                metrics.first_token.observe(now - generation.arrived)
            sequence.first = sequence.last = now
        elif fresh > 0:
            metrics.gap.observe(now - sequence.last)
        if fresh > 0:
            sequence.last = now
            sequence.counted = sequence.generated
            self.generation_tokens += fresh
            metrics.generation_tokens.inc(fresh)
        generation.longest = max(generation.longest, sequence.generated)
        if delta.finish_reason is None:
            return
        if sequence.generated > 1:
            for histogram in metrics.per_token:
                histogram.observe((sequence.last - sequence.first) / (sequence.generated - 1))
        metrics.sequence_ended(
            sequence.prompt_tokens, sequence.generated, sequence.max_tokens, delta.num_preemptions, delta.times
        )


def _failure(reason: str) -> AiakqError:
    """What a client is told about a sequence that ended with an error."""
    if reason == NOTHING_LEFT:
        return error("nothing_left", reason=reason)
    if reason == OUT_OF_MEMORY:
        return error("request_memory")
    return error("numerical_error", reason=reason.rstrip("."))


def _to_nobody(record: ToEngine) -> None:
    """There is no engine to send to."""
