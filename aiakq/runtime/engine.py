"""The engine: a state machine with one transition, ``step(now, inbox) -> StepOutput``.

A step takes what arrived, schedules, runs the model once and commits the tokens. There is no clock, thread, socket or
random source in here, so a run can be repeated exactly. ``serve`` keeps an engine in a process of its own; ``LLM``
calls it directly.

With ``ahead``, a step launches the model for its own tokens and commits those of the step before, so that a GPU
computes while the host works (docs/decisions/0016-one-step-ahead.md).
"""

from __future__ import annotations

import math

from aiakq.runtime.messages import (
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
from aiakq.runtime.runner import Flight, Runner, RunResult
from aiakq.runtime.sampler import NOT_FINITE, Sampled
from aiakq.runtime.scheduler import Scheduled, Scheduler
from aiakq.runtime.sequence import Sequence


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

    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self._sequences)

    def step(self, now: float, inbox: Inbox) -> StepOutput:
        """Take ``inbox``, run the model once, and return the news. ``now`` is in seconds on the caller's clock."""
        outputs: list[TokenOutput] = []
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
        launched = self.runner.launch(items) if items else None
        self._land(now, outputs)
        # Sampled only now: what a token depends on, up to the one before it, is known on the host.
        alive = [item for item in items if not item.dropped]
        if launched is not None and alive:
            launched.sample(alive)
            self._flight = launched
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
        for item, result in zip(flight.items, flight.results(), strict=True):
            if not item.dropped:
                self._commit(item, result, now, outputs)

    def _commit(self, item: Scheduled, result: RunResult, now: float, outputs: list[TokenOutput]) -> None:
        """Take over what one sequence's part of a step produced."""
        sequence = item.sequence
        failure = _failure(result)
        if failure is not None:
            # What this sequence wrote may not be finite: nobody may find or inherit it.
            self.runner.clear(self.scheduler.pool.forget(sequence.pages))
            news = self._news(sequence)
            news.error = failure
            self._finish(sequence, news, "error")
            outputs.append(news)
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
