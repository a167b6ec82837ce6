"""The engine: a state machine with one transition, ``step(now, inbox) -> StepOutput``.

A step takes what arrived, schedules, runs the model once and commits the tokens. There is no clock, thread, socket or
random source in here, so a run can be repeated exactly. ``serve`` keeps an engine in a process of its own; ``LLM``
calls it directly.

With ``ahead``, a step launches the model for its own tokens and commits those of the step before, so that a GPU
computes while the host works (docs/decisions/0016-asynchronous-scheduling.md).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from typing import TypeVar

from aiakq.errors import error
from aiakq.runtime.device_memory import is_out_of_memory
from aiakq.runtime.engine.messages import (
    OUT_OF_MEMORY,
    Abort,
    EngineStats,
    Inbox,
    ModelLimits,
    RequestSpec,
    RequestTimes,
    ResetPrefixCache,
    StepOutput,
    TokenLogprobs,
    TokenOutput,
)
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import Scheduled, Sequence
from aiakq.runtime.executor.runner import Flight, Runner, RunResult
from aiakq.runtime.executor.sampler import NOT_FINITE, Sampled

T = TypeVar("T")

#: The id of what the engine asks itself.
PROBE = "probe"


class Engine:
    """Continuous batching over a paged KV cache.

    limits  what requests are checked against (``messages.admit``).
    facts   what the start-up table shows: dtype and why, kernels per layer kind, pages.
    stats   after the last step.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: ModelLimits,
        facts: dict[str, str],
        ahead: bool = False,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.limits = limits
        self.facts = facts
        self.ahead = ahead
        self.stats = EngineStats(num_pages=scheduler.pool.num_usable, num_free_pages=scheduler.pool.num_free)
        self._sequences: dict[str, Sequence] = {}
        self._flight: Flight | None = None  # sampled, and not committed
        self._prompt_tokens = 0
        self._bad_steps = 0  # in a row, without a finite row

    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self._sequences)

    def step(self, now: float, inbox: Inbox) -> StepOutput:
        """Take ``inbox``, run the model once, and return the news. ``now`` is in seconds on the caller's clock.

        Raises ``model_broken`` when the model computes nothing that is finite any more.
        """
        outputs: list[TokenOutput] = []
        if self._bad_steps >= 2:
            self._check_model(now, outputs)
        for message in inbox:
            if isinstance(message, RequestSpec):
                self._add(message, now)
            elif isinstance(message, ResetPrefixCache):
                self.scheduler.forget_prefixes()
            else:
                self._abort(message, outputs)
        if self._flight is not None and self.scheduler.may_preempt():
            # Who has ended gives pages back, and nobody is preempted whose token is on its way.
            self._land(now, outputs)
        items = self.scheduler.schedule(now)
        started = [item.sequence for item in items if item.sequence.times.scheduled is None]
        for sequence in started:
            sequence.times.scheduled = now
        launched = self._fitting(self.runner.launch, items) if items else None
        self._land(now, outputs)
        # Sampled only now: what a token depends on, up to the one before it, is known on the host.
        alive = [item for item in items if not item.dropped]
        if alive and launched is not None and self._fitting(launched.sample, alive):
            self._flight = launched
        elif alive:
            launched = None
            # The memory that was given back may do for one, and for fewer than before.
            whole = len(alive) == 1 or len(alive) < len(items)
            self._run_apart([alive] if whole else _halves(alive), now, outputs)
        if not self.ahead:
            self._land(now, outputs)
        self._count(items, outputs)
        return StepOutput(outputs, self.stats, [sequence.id for sequence in started])

    def abort_all(self) -> list[TokenOutput]:
        """Abort every request and return their last news."""
        outputs: list[TokenOutput] = []
        for request_id in list(self._sequences):
            self._abort(Abort(request_id), outputs)
        self._flight = None
        self._count([], outputs)
        return outputs

    def check(self) -> None:
        """Assert the invariants that hold between steps: no page lost, held twice or crossed, no token awaited that
        is not on its way.
        """
        self.scheduler.check()
        awaited = [item for item in self._flight.items if not item.dropped] if self._flight else []
        assert all(self._sequences[item.sequence.id] is item.sequence for item in awaited)
        assert sum(sequence.num_coming for sequence in self._sequences.values()) == sum(item.draws for item in awaited)
        assert all(item.sequence.num_coming == item.draws for item in awaited)

    def _add(self, spec: RequestSpec, now: float) -> None:
        assert spec.request_id not in self._sequences, f"request {spec.request_id} was added twice"
        sequence = Sequence(spec, RequestTimes(arrived=now))
        self._sequences[spec.request_id] = sequence
        self.scheduler.add(sequence)

    def _abort(self, message: Abort, outputs: list[TokenOutput]) -> None:
        sequence = self._sequences.get(message.request_id)
        if sequence is not None:
            news = self._news(sequence)
            self._finish(sequence, news, "abort")
            outputs.append(news)

    def _land(self, now: float, outputs: list[TokenOutput]) -> None:
        """Wait for what is on its way, if anything is, and commit it."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        results = flight.results()
        for item, result in zip(flight.items, results, strict=True):
            if not item.dropped:
                self._commit(item, result, now, outputs)
        if any(result.sampled is not None and result.sampled.error != NOT_FINITE for result in results):
            self._bad_steps = 0
        elif any(_failure(result) == NOT_FINITE for result in results):
            self._bad_steps += 1

    def _fitting(self, call: Callable[[list[Scheduled]], T], items: list[Scheduled]) -> T | None:
        """What ``call`` returns, or None if there is not enough memory for it."""
        try:
            return call(items)
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
        # Only here the tensors are gone that the traceback held.
        self.runner.release_memory()
        return None

    def _run_apart(self, parts: list[list[Scheduled]], now: float, outputs: list[TokenOutput]) -> None:
        """Run ``parts`` of a step that did not fit into memory, in halves where one still does not; who does not fit
        alone fails.
        """
        for part in parts:
            flight = self._fitting(self.runner.launch, part)
            if flight is not None and self._fitting(flight.sample, part):
                self._flight = flight
                self._land(now, outputs)
            elif len(part) > 1:
                flight = None
                self._run_apart(_halves(part), now, outputs)
            else:
                self._fail(part[0].sequence, OUT_OF_MEMORY, outputs)

    def _check_model(self, now: float, outputs: list[TokenOutput]) -> None:
        """Raise ``model_broken`` if it does not compute a prompt of our own either; requests may all be hostile."""
        self._land(now, outputs)
        pages = self.scheduler.pool.allocate(1) if self._bad_steps >= 2 else None
        if pages is None:
            return
        token = self.limits.eos_token_ids[0] if self.limits.eos_token_ids else 0
        sequence = Sequence(RequestSpec(PROBE, [token], 1, seed=0, temperature=0.0), RequestTimes(arrived=now))
        sequence.pages = pages
        item = Scheduled.of(sequence, 1)
        flight = self._fitting(self.runner.launch, [item])
        if flight is not None and self._fitting(flight.sample, [item]):
            if _failure(flight.results()[0]) == NOT_FINITE:
                raise error("model_broken")
            self._bad_steps = 0
        self.scheduler.pool.release(pages)

    def _commit(self, item: Scheduled, result: RunResult, now: float, outputs: list[TokenOutput]) -> None:
        """Take over what one sequence's part of a step produced."""
        sequence = item.sequence
        failure = _failure(result)
        if failure is not None:
            if failure == NOT_FINITE:
                # What this sequence wrote may not be finite either: nobody may find or inherit it.
                self.runner.clear(self.scheduler.pool.forget(sequence.pages))
            self._fail(sequence, failure, outputs)
            return
        if result.prompt_logprobs is not None:
            self._keep_prompt_logprobs(item, result.prompt_logprobs)
        if result.sampled is not None and result.sampled.again:
            sequence.draw_again()
            return
        self.scheduler.computed(item)
        if not sequence.prompt_done and item.end >= sequence.num_prompt:
            # What a preemption repeats does not count again.
            sequence.prompt_done = True
            self._prompt_tokens += sequence.num_prompt
        if result.sampled is not None:
            outputs.append(self._append(sequence, result.sampled, now))
        elif item.completes:
            news = self._news(sequence)
            self._finish(sequence, news, "length")
            outputs.append(news)

    def _keep_prompt_logprobs(self, item: Scheduled, found: list[TokenLogprobs]) -> None:
        sequence = item.sequence
        if item.first == 0:
            sequence.prompt_logprobs = [None]
        if sequence.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.num_prompt:
            sequence.prompt_logprobs += found

    def _append(self, sequence: Sequence, sampled: Sampled, now: float) -> TokenOutput:
        sequence.token_ids.append(sampled.token)
        sequence.num_coming -= 1
        times = sequence.times
        if times.first_token is None:
            times.first_token = now
        times.last_token = now
        news = self._news(sequence)
        news.token_ids = [sampled.token]
        news.token_logprobs = [sampled.logprob]
        news.logprobs = [sampled.logprobs] if sampled.logprobs else None
        reason, stop_reason = sequence.finish_reason(sampled.token)
        if reason is not None:
            self._finish(sequence, news, reason)
            news.stop_reason = stop_reason
        return news

    def _news(self, sequence: Sequence) -> TokenOutput:
        """A report on ``sequence``; prompt log-probabilities travel once, with the first."""
        news = TokenOutput(
            request_id=sequence.id,
            num_cached_tokens=sequence.num_cached or 0,
            num_preemptions=sequence.num_preemptions,
            times=sequence.times,
        )
        if sequence.prompt_logprobs is not None and len(sequence.prompt_logprobs) == sequence.num_prompt:
            if sequence.num_outputs <= 1:
                news.prompt_logprobs = sequence.prompt_logprobs
        return news

    def _fail(self, sequence: Sequence, reason: str, outputs: list[TokenOutput]) -> None:
        news = self._news(sequence)
        news.error = reason
        self._finish(sequence, news, "error")
        outputs.append(news)

    def _finish(self, sequence: Sequence, news: TokenOutput, reason: str) -> None:
        news.finish_reason = reason
        sequence.drop_launched()
        self.scheduler.remove(sequence)
        del self._sequences[sequence.id]

    def _count(self, items: list[Scheduled], outputs: list[TokenOutput]) -> None:
        """Refresh ``stats``."""
        old, scheduler = self.stats, self.scheduler
        self.stats = EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_pages=scheduler.pool.num_usable,
            num_free_pages=scheduler.pool.num_free,
            num_scheduled_tokens=sum(item.count for item in items),
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=old.generation_tokens + sum(len(output.token_ids) for output in outputs),
            steps=old.steps + bool(items),
        )


def _failure(result: RunResult) -> str | None:
    """Why a sequence cannot go on after a step: a token that could not be drawn, or a score that is not a number."""
    if result.sampled is not None and result.sampled.error is not None:
        return result.sampled.error
    return NOT_FINITE if any(math.isnan(scores.logprobs[0]) for scores in result.prompt_logprobs or ()) else None


def _halves(items: list[Scheduled]) -> list[list[Scheduled]]:
    """``items``, at least two, cut where about half of the tokens are on either side."""
    tokens = list(itertools.accumulate(item.count for item in items))
    cut = min(1 + bisect.bisect_left(tokens, tokens[-1] // 2), len(items) - 1)
    return [items[:cut], items[cut:]]
