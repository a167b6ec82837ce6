"""A simulation: the engine with a fake executor, its requests, and the invariants that every step must keep."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

from fairness_checks import FairnessChecks
from fake_executor import EngineDied, Fault, OutOfMemoryRow, PagedExecutor, Row, RowResult
from page_checks import PageChecks
from pipelined_executor import PipelinedExecutor
from simulated_model import VOCAB, ReferenceRequest
from simulation_config import SimulationConfig
from tracked_requests import Totals, TrackedRequest, Violation, require

from aiakq.errors import AiakqError
from aiakq.runtime.build.features import new_scheduler
from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.sequence import ScheduledChunk, ScheduledStep, Sequence
from aiakq.runtime.protocol.admission import admit
from aiakq.runtime.protocol.command import Abort, Inbox, ResetPrefixCache
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import OUT_OF_MEMORY, StepOutput, TokenOutput
from aiakq.runtime.protocol.request import RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import NOT_FINITE
from aiakq.runtime.speculation.planner import DraftPlanner

#: A request fails with the engine's second death, as in the server.
MAX_ENGINE_DEATHS = 2
#: The longest prompt takes 40 steps of one token.
MAX_STEPS_WITHOUT_OUTPUT = 64


class Simulation:
    """One engine and its requests.

    now         time in seconds; callers advance it.
    trace       checksum of all outputs.
    requests    all requests so far by id; ``unfinished`` are those without a finish reason.
    scheduled   chunks of the last step.
    """

    def __init__(self, config: SimulationConfig, totals: Totals | None = None) -> None:
        self.config = config
        self.totals = totals or Totals()
        self.totals.simulations += 1
        self.steps = self.trace = 0
        self.now = 0.0
        self.requests: dict[str, TrackedRequest] = {}
        self.unfinished: dict[str, TrackedRequest] = {}
        self._start_engine()

    def _start_engine(self) -> None:
        config = self.config
        executor = PipelinedExecutor if config.num_stages > 1 else PagedExecutor
        self.executor = executor(config.num_pages, config.page_size)
        pool = PagePool(config.num_pages, config.page_size, config.caching)
        capacity = pool.num_usable * config.page_size
        limits = ModelLimits(VOCAB, config.max_len, capacity, eos_token_ids=(0,), by_priority=True)
        scheduler = new_scheduler(config.scheduler, pool)
        scheduler.min_columns = config.min_columns
        planner = scheduler.resource(DraftPlanner)
        if planner is not None:
            planner.costs, planner.max_rows = config.step_costs, config.max_rows
        self.scheduled: list[ScheduledChunk] = []
        scheduler.schedule = self._recorded(scheduler.schedule)  # type: ignore[method-assign]
        self.engine = Engine(self.executor, scheduler, limits, {}, max(config.num_stages, 1 + config.async_scheduling))
        self.page_checks = PageChecks(self.engine, self.executor, config)
        self.fairness_checks = FairnessChecks(scheduler, config)
        self._num_generated = self._num_prompt_tokens = self._num_preemptions = self._num_busy_steps = 0
        self._num_queried = self._num_hits = 0
        self._steps_not_finite = self._steps_broken = self._steps_of_head = self._steps_without_output = 0
        self._head: str | None = None
        self._num_outputs = (0, 0)
        # Full pages that may be cached: cache epoch, salt, and the entry of the last position.
        self._cacheable: set[tuple[int, str, int]] = set()

    def _recorded(self, schedule: Callable[[float], ScheduledStep]) -> Callable[[float], ScheduledStep]:
        """Wrap ``schedule`` to keep its last result in ``scheduled``."""

        def scheduled(now: float = 0.0) -> ScheduledStep:
            step = schedule(now)
            self.scheduled = [replace(chunk) for chunk in step]  # the engine shrinks them by rejected draft tokens
            if (decodes := step.decodes) is not None:
                self.totals.columns += len(decodes)
                self.scheduled[:0] = decodes.filling(1, range(len(decodes)))
            return step

        return scheduled

    def add_request(
        self, prompt: list[int], params: SamplingParams, count: int = 1, priority: int = 0, **options: str
    ) -> list[RequestSpec]:
        """Track ``count`` requests that share a prompt; return what to put into the inbox. See RequestOptions."""
        specs = []
        for index in range(count):
            number = len(self.requests)
            given = RequestOptions(priority=priority, **options)
            spec = admit(f"r{number}", prompt, params, self.engine.limits, index, options=given)
            request = TrackedRequest(spec, ReferenceRequest(spec), (priority, number))
            self.requests[spec.request_id] = self.unfinished[spec.request_id] = request
            specs.append(spec)
        self.totals.requests += count
        return specs

    def finish(self) -> None:
        """Run until every request is finished; then all pages must be free."""
        num_tokens = sum(one.spec.max_tokens + len(one.spec.prompt_token_ids) for one in self.unfinished.values())
        limit = 2 * num_tokens + 2
        for _ in range(limit):
            if self.unfinished:
                self.step([], None)
        require(not self.unfinished, f"unfinished {limit} steps after the last request: {sorted(self.unfinished)}")
        pool = self.engine.scheduler.pool
        require(pool.num_free == pool.num_usable, "a page is lost")

    def step(self, inbox: Inbox, fault: Fault | None) -> None:
        """Run one step of the engine and check every invariant."""
        self.steps += 1
        self.totals.steps += 1
        scheduler = self.engine.scheduler
        if any(isinstance(message, ResetPrefixCache) for message in inbox):
            self.executor.epoch += 1
        aborts = [message for message in inbox if isinstance(message, Abort)]
        aborted = {id for message in aborts for id in message.request_ids} & self.unfinished.keys()
        before = [
            (one, scheduler.num_wanted(one), one.num_preemptions) for one in scheduler.running if one.id not in aborted
        ]
        self.executor.begin(fault)
        self.scheduled = []
        was_broken = self.executor.is_broken
        probes = self._steps_not_finite >= 2
        should_stop = was_broken and probes and scheduler.pool.num_free
        result = self._engine_step(inbox, aborted, was_broken)
        if result is None:
            return
        if fault and self.scheduled:
            self.totals.faults[fault.kind] += 1
        try:
            self.engine.check()
        except AssertionError as failure:
            raise Violation(str(failure)) from failure
        self._outputs: dict[str, list[TokenOutput]] = {}
        for output in result.all_outputs():
            self._outputs.setdefault(output.request_id, []).append(output)
        # An engine that probes its model collects pending results before it takes the inbox.
        aborted_late = sorted(aborted) if probes else []
        for id in sorted(aborted.difference(aborted_late)):
            self._check_finish(id, "abort")
        self._check_schedule(before, result)
        collected = self._check_events(was_broken)
        for id in aborted_late:
            if self.requests[id].finish_reason is None:
                self._check_finish(id, "abort")
        unexpected = [id for id, outputs in self._outputs.items() if outputs]
        require(not unexpected, f"requests have outputs that no result explains: {unexpected}")
        busy = self.scheduled or collected or self.executor.events
        require(busy or not self.unfinished, "nothing runs although there is work")
        # A step that was launched before may still be finite.
        if not self.executor.probe_out_of_memory:
            self._steps_broken += 1 if should_stop else -self._steps_broken
        require(self._steps_broken < 3, "the engine continues with a broken model")
        self.page_checks.check()
        self._check_counters(result)
        self._check_head_of_line()
        self._check_output_progress()

    def _engine_step(self, inbox: Inbox, aborted: set[str], was_broken: bool) -> StepOutput | None:
        """Return what the engine's step returns; None if the engine ended and was replaced."""
        try:
            return self.engine.step(self.now, inbox)
        except EngineDied:
            self.totals.faults["engine_death"] += 1
        except AiakqError as failure:
            require(was_broken and self._steps_not_finite >= 2, f"the engine gave up: {failure}")
        except (Violation, KeyboardInterrupt):
            raise
        except BaseException as failure:
            raise Violation(f"{type(failure).__name__}: {failure}") from failure
        self._replace_engine(aborted)
        return None

    def abort_all(self) -> None:
        """Abort every request, as when a call of ``LLM`` is interrupted."""
        outputs = self.engine.abort_all()
        ids = {output.request_id for output in outputs}
        require(ids == set(self.unfinished) and len(outputs) == len(ids), "not every request has one output")
        require(all(output.finish_reason == "abort" for output in outputs), "not every request is aborted")
        for request in list(self.unfinished.values()):
            self._finish(request, "abort")
        self.engine.check()
        require(not self.engine.has_work(), "the engine has work after all requests were aborted")

    def _replace_engine(self, aborted: set[str]) -> None:
        """Start a new engine and replay the requests that have no output yet, as the supervisor does."""
        for id in aborted:
            self._finish(self.unfinished[id], "abort")
        replayed = []
        for request in list(self.unfinished.values()):
            request.engine_deaths += 1
            if request.num_received or request.engine_deaths >= MAX_ENGINE_DEATHS:
                self._finish(request, "engine ended")
                continue
            request.reference = ReferenceRequest(request.spec)
            request.num_computed = request.num_pending = 0
            request.num_starts = 1
            request.is_queried = request.is_started = request.is_counted = request.resamples = False
            replayed.append(request.spec)
        self._start_engine()
        self.step([*replayed], None)

    def _finish(self, request: TrackedRequest, reason: str) -> None:
        request.finish_reason = reason
        self.totals.finish_reasons[reason] += 1
        del self.unfinished[request.spec.request_id]

    # --- invariants

    def _check_schedule(self, before: list[tuple[Sequence, int, int]], result: StepOutput) -> None:
        """Check the limits of a step, the order of service, and that decoding sequences are in it.

        ``before`` lists the sequences that ran before, with their uncomputed tokens and number of preemptions.
        """
        scheduler, config = self.engine.scheduler, self.config
        rows = self.scheduled
        scheduled = sum(chunk.count for chunk in rows)
        require(scheduled <= config.token_budget, f"{scheduled} tokens in a step of {config.token_budget}")
        require(scheduled == result.stats.num_scheduled_tokens, "the number of scheduled tokens is wrong")
        require(len(rows) <= config.max_num_seqs >= len(scheduler.running), "too many sequences run")
        ids = {chunk.sequence.id for chunk in rows}
        for request, chunk in ((self.requests[chunk.sequence.id], chunk) for chunk in rows):
            if not request.is_queried:
                request.is_queried = True
                self._num_queried += len(request.spec.prompt_token_ids)
                self._num_hits += chunk.first
                self.totals.cached += chunk.first
        require(len(ids) == len(rows), "a sequence is twice in a step")
        ones = [chunk.count == 1 for chunk in rows]
        require(ones == sorted(ones, reverse=True), "prefill chunks precede decodes")
        decoding = [one for one, missing, times in before if missing == 1 and one.num_preemptions == times]
        if config.num_clients > 1:
            self.fairness_checks.check(before, rows, self._priority)
            self._count_preemptions(sum(one.num_preemptions > times for one, _, times in before))
            return
        # With async scheduling, a shortage of pages makes the engine collect first: then sequences may have finished.
        served = [one.id in ids for one in decoding if one.id in ids or one.id not in self._outputs]
        if config.num_stages == 1 and sum(missing == 1 for _, missing, _ in before) <= config.token_budget:
            require(all(served), "a decoding sequence got no token")
        else:
            require(served == sorted(served, reverse=True), "a later sequence got a token before an earlier one")
        # First come, first served; the last to come is preempted first.
        known = {one for one, _, _ in before}
        admitted = [self._priority(one) for one in scheduler.running if one not in known]
        victims = [self._priority(one) for one, _, times in before if one.num_preemptions > times]
        if admitted and scheduler.waiting and not config.allows_overtaking:
            require(max(admitted) < min(map(self._priority, scheduler.waiting)), "a request was overtaken")
        if victims:
            stayed = [self._priority(one) for one, _, times in before if one.num_preemptions == times and one.id in ids]
            require(not stayed or max(stayed) < min(victims), "an earlier request was preempted before a later one")
        self._count_preemptions(len(victims))

    def _count_preemptions(self, number: int) -> None:
        self._num_preemptions += number
        self.totals.preemptions += number

    def _check_events(self, was_broken: bool) -> bool:
        """Check what the executor did in this step, in order; return whether results were collected."""
        collected = False
        for event in self.executor.events:
            if event is None:
                require(not was_broken, "the engine continues with a broken model")
                self._steps_not_finite = 0
            elif isinstance(event, OutOfMemoryRow):
                self._check_row(event.row)
                self._check_finish(event.row.id, "error", OUT_OF_MEMORY)
            elif isinstance(event[0], Row):
                for row in event:
                    self._check_row(row)
            else:
                collected = True
                self._check_results(event)
        return collected

    def _check_row(self, row: Row) -> None:
        """Check a sequence's part of a step that runs."""
        request, first, P = self.requests[row.id], row.first, self.config.page_size
        end = first + row.count - row.num_drafts
        spec = request.spec
        total = len(spec.prompt_token_ids) + request.num_received + request.num_pending
        jumps = first != request.num_computed
        if not request.is_started:
            request.is_started = True
            may_hit = self.config.caching and spec.sampling.prompt_logprobs is None
            require(first == 0 or may_hit, "a request that needs its whole prompt was given cached pages")
        else:
            require(not jumps or row.num_starts > request.num_starts, "positions were left out")
        if jumps and first:
            require(first % P == 0 and first < total, f"{first} tokens cannot come from the cache")
            page = (row.epoch, spec.options.cache_salt, request.reference.entries[first - 1])
            require(page in self._cacheable, f"{row.id} was given pages that it must not find")
        request.num_starts, request.num_computed = row.num_starts, end
        require(first < end <= total, "a step has more tokens of a sequence than exist")
        room = len(spec.prompt_token_ids) + spec.max_tokens
        require(not row.num_drafts or end + row.num_drafts < room, "draft tokens exceed max_tokens")
        require(self.config.scheduler.enable_chunked_prefill or end == total, "a prompt was split")
        require(row.samples == (end == total and spec.max_tokens > 0), "a token is sampled at the wrong time")
        request.num_pending += row.samples
        require(request.num_pending <= 1 or self.config.async_scheduling, "a token is sampled before its predecessor")

    def _check_results(self, results: list[RowResult]) -> None:
        """Check that the results of a step led to the right outputs."""
        for one in results:
            request = self.requests[one.row.id]
            is_finished = request.finish_reason is not None
            one.is_dropped = one.is_skipped or is_finished
            require(not one.is_skipped or is_finished or request.resamples, f"{one.row.id} was left out")
        kept = [one for one in results if not one.is_dropped]
        if any(one.row.samples and one.error != NOT_FINITE for one in kept):
            self._steps_not_finite = 0
        elif any(one.error == NOT_FINITE for one in kept):
            self._steps_not_finite += 1
        for one in kept:
            row, request = one.row, self.requests[one.row.id]
            spec = request.spec
            if one.error:
                self._check_finish(row.id, "error", one.error)
                continue
            end = row.first + row.count - row.num_drafts
            request.num_pending -= row.samples
            request.resamples = one.resamples
            if one.resamples:
                self._add_cacheable(row, request, end)
                # The last token is computed again.
                request.num_computed, request.num_pending = len(spec.prompt_token_ids) + request.num_received - 1, 0
                continue
            if not request.is_counted and end >= len(spec.prompt_token_ids):
                request.is_counted = True
                self._num_prompt_tokens += len(spec.prompt_token_ids)
            if row.samples:
                accepted = self._check_tokens(request, one.num_tokens) - 1
                request.num_computed += accepted
                self.totals.drafts += row.num_drafts
                self.totals.accepted += accepted
                self._add_cacheable(row, request, end + accepted)
                continue
            self._add_cacheable(row, request, end)
            if end == len(spec.prompt_token_ids) and spec.max_tokens == 0:
                output = self._check_finish(row.id, "length")
                require(not output.token_ids, f"{row.id} has tokens although max_tokens is 0")

    def _add_cacheable(self, row: Row, request: TrackedRequest, end: int) -> None:
        """Allow later requests to find the full pages up to ``end``."""
        if row.epoch == self.executor.epoch:
            P, salt, entries = self.config.page_size, request.spec.options.cache_salt, request.reference.entries
            ends = range((row.first // P + 1) * P, end + 1, P)
            self._cacheable |= {(row.epoch, salt, entries[at - 1]) for at in ends}

    def _check_tokens(self, request: TrackedRequest, count: int) -> int:
        """Check that at most ``count`` tokens and the finish reason equal the reference; return how many tokens."""
        id = request.spec.request_id
        tokens, logprobs, reason, stop = [], [], None, None
        while reason is None and len(tokens) < count:
            token, logprob, reason, stop = request.reference.next()
            tokens.append(token)
            logprobs.append(logprob)
        output = self._check_finish(id, reason) if reason else self._next_output(id)
        require(output.token_ids == tokens, f"{id} has other tokens than the reference")
        require(output.token_logprobs == logprobs, f"{id} has other log-probabilities than the reference")
        finish = (output.finish_reason, output.stop_reason)
        require(finish == (reason, stop), f"{id} finished with {finish} instead of {(reason, stop)}")
        require(output.error is None, f"{id} failed: {output.error}")
        if not request.num_received:
            self._check_prompt_logprobs(request, output)
        request.num_received += len(tokens)
        self._num_generated += len(tokens)
        self.totals.tokens += len(tokens)
        self.trace = zlib.crc32(f"{id} {tokens}".encode(), self.trace)
        times = output.times
        require(times and times.scheduled is not None and times.last_token == self.now, f"{id} has wrong times")
        require(times.arrived <= times.scheduled <= times.first_token <= self.now, f"{id} has times out of order")
        return len(tokens)

    def _check_prompt_logprobs(self, request: TrackedRequest, output: TokenOutput) -> None:
        """Check the log-probabilities of the prompt, which the first output of a request has if it sets the option."""
        wanted = request.spec.sampling.prompt_logprobs is not None
        expected = request.reference.prompt_logprobs() if wanted else None
        require(output.prompt_logprobs == expected, f"{request.spec.request_id} has wrong prompt log-probabilities")

    def _next_output(self, id: str) -> TokenOutput:
        """Return the next output of ``id`` in this step."""
        require(self._outputs.get(id), f"{id} has no output")
        return self._outputs[id].pop(0)

    def _check_finish(self, id: str, reason: str, error: str | None = None) -> TokenOutput:
        """Check that ``id`` finishes now, once, with this reason; return its output."""
        request, output = self.requests[id], self._next_output(id)
        require(request.finish_reason is None, f"{id} finishes twice")
        require(output.finish_reason == reason, f"{id} finished with {output.finish_reason} instead of {reason}")
        require(output.error == error, f"{id} has error {output.error} instead of {error}")
        if reason == "length" and request.spec.max_tokens == 0:
            self._check_prompt_logprobs(request, output)
        self._finish(request, reason)
        self.trace = zlib.crc32(f"{id} {reason}".encode(), self.trace)
        return output

    def _check_counters(self, result: StepOutput) -> None:
        stats, scheduler = result.stats, self.engine.scheduler
        self._num_busy_steps += bool(self.scheduled)
        counters = {
            "generation_tokens": (stats.generation_tokens, self._num_generated),
            "prompt_tokens": (stats.prompt_tokens, self._num_prompt_tokens),
            "preemptions": (stats.preemptions, self._num_preemptions),
            "prefix_queries": (stats.prefix_queries, self._num_queried),
            "prefix_hits": (stats.prefix_hits, self._num_hits),
            "steps": (stats.steps, self._num_busy_steps),
            "num_free_pages": (stats.num_free_pages, scheduler.pool.num_free),
            "num_running": (stats.num_running, len(scheduler.running)),
            "num_waiting": (stats.num_waiting, len(scheduler.waiting)),
            "num_unfinished": (len(scheduler.running) + len(scheduler.waiting), len(self.unfinished)),
        }
        for name, (found, expected) in counters.items():
            require(found == expected, f"{name} is {found} instead of {expected}")

    def _check_head_of_line(self) -> None:
        """Check that no request is first in line for longer than all running ones can take."""
        if not self.unfinished:
            self._head = None
            return
        head = min(self.unfinished.values(), key=lambda request: request.priority).spec.request_id
        if head != self._head:
            self._head, self._steps_of_head = head, 0
        self._steps_of_head += 1
        limit = 4 * self.config.max_len * self.config.max_num_seqs * self.config.num_clients
        require(self._steps_of_head <= limit, f"{head} is first in line for more than {limit} steps")

    def _check_output_progress(self) -> None:
        """Check that, while there is work, a request gets a token or finishes within MAX_STEPS_WITHOUT_OUTPUT steps."""
        num_outputs = self.totals.tokens, sum(self.totals.finish_reasons.values())
        moved = num_outputs != self._num_outputs or not self.unfinished
        self._num_outputs = num_outputs
        self._steps_without_output = 0 if moved else self._steps_without_output + 1
        limit = MAX_STEPS_WITHOUT_OUTPUT
        require(self._steps_without_output <= limit, f"no request gets a token for more than {limit} steps")

    def _priority(self, sequence: Sequence) -> tuple[int, int]:
        """Return the place of ``sequence`` in the order of service: priority, then arrival."""
        return self.requests[sequence.id].priority
