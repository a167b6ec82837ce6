"""An engine of given sizes, its clients, and after every step everything that must hold."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

from clients import Client, Totals, Violation, must
from fairness_checks import FairnessChecks
from model import VOCAB, Alone, Collected, Died, Fault, PagedExecutor, Refused, Row
from page_checks import PageChecks
from sizes import Setup
from staged import StagedExecutor

from aiakq.errors import AiakqError
from aiakq.runtime.build.features import new_scheduler
from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.protocol.admission import admit
from aiakq.runtime.protocol.command import Abort, Inbox, ResetPrefixCache
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import OUT_OF_MEMORY, StepOutput, TokenOutput
from aiakq.runtime.protocol.request import RequestOptions, RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.runtime.protocol.step import NOT_FINITE
from aiakq.runtime.speculation.planner import DraftPlanner

#: Deaths of the engine that a request may take part in; as in the server's table.
DEATHS = 2
#: Steps in which nobody is told anything, at most: a prompt of the greatest length takes 40 steps of one token.
QUIET_STEPS = 64


class World:
    """One engine and its clients.

    now      on the clients' clock; they move it.
    trace    a sum of all that was told.
    clients  all there were; ``live`` are those who wait.
    """

    def __init__(self, setup: Setup, totals: Totals | None = None) -> None:
        self.setup = setup
        self.totals = totals or Totals()
        self.totals.worlds += 1
        self.steps = self.trace = 0
        self.now = 0.0
        self.clients: dict[str, Client] = {}
        self.live: dict[str, Client] = {}
        self._start_engine()

    def _start_engine(self) -> None:
        setup = self.setup
        self.model = (StagedExecutor if setup.stages > 1 else PagedExecutor)(setup.num_pages, setup.page_size)
        pool = PagePool(setup.num_pages, setup.page_size, setup.caching)
        capacity = pool.num_usable * setup.page_size
        limits = ModelLimits(VOCAB, setup.max_len, capacity, eos_token_ids=(0,), by_priority=True)
        scheduler = new_scheduler(setup.scheduler, pool)
        planner = scheduler.resource(DraftPlanner)
        if planner is not None:
            planner.costs, planner.max_rows = setup.costs, setup.max_rows
        self.scheduled: list[ScheduledChunk] = []
        scheduler.schedule = self._recorded(scheduler.schedule)  # type: ignore[method-assign]
        self.engine = Engine(self.model, scheduler, limits, {}, max(setup.stages, 1 + setup.ahead))
        self.page_checks = PageChecks(self.engine, self.model, setup)
        self.fairness_checks = FairnessChecks(scheduler, setup)
        self._generated = self._prompted = self._preempted = self._queried = self._hit = self._worked = 0
        self._bad_steps = self._doubts = self._head_steps = self._quiet_steps = 0
        self._head: str | None = None
        self._emitted = (0, 0)
        # Full pages: the epoch in which they were computed, the salt, and what the last position holds.
        self._pages: set[tuple[int, str, int]] = set()

    def _recorded(self, schedule: Callable[[float], list[ScheduledChunk]]) -> Callable[[float], list[ScheduledChunk]]:
        """``schedule``, with its last result kept in ``scheduled``."""

        def scheduled(now: float = 0.0) -> list[ScheduledChunk]:
            chunks = schedule(now)
            self.scheduled = [replace(chunk) for chunk in chunks]  # without what turns out wrong they get smaller
            return chunks

        return scheduled

    def ask(
        self,
        prompt: list[int],
        params: SamplingParams,
        count: int = 1,
        priority: int = 0,
        salt: str = "",
        owner: str = "",
    ) -> list[RequestSpec]:
        """A request, or several that share their prompt: what to put into an inbox."""
        specs = []
        for index in range(count):
            number = len(self.clients)
            limits = self.engine.limits
            options = RequestOptions(priority=priority, cache_salt=salt, client=owner)
            spec = admit(f"r{number}", prompt, params, limits, index, options=options)
            self.clients[spec.request_id] = self.live[spec.request_id] = Client(spec, Alone(spec), (priority, number))
            specs.append(spec)
        self.totals.requests += count
        return specs

    def finish(self) -> None:
        """As many steps as the clients need to be done; then every page is back."""
        enough = sum(client.spec.max_tokens + len(client.spec.prompt_token_ids) for client in self.live.values())
        for _ in range(2 * enough + 2):
            if not self.live:
                break
            self.step([], None)
        must(not self.live, f"not done {2 * enough + 2} steps after the last request: {sorted(self.live)}")
        pool = self.engine.scheduler.pool
        must(pool.num_free == pool.num_usable, "a page is lost")

    def step(self, inbox: Inbox, fault: Fault | None) -> None:
        """One step, and everything that must hold after it."""
        self.steps += 1
        self.totals.steps += 1
        scheduler = self.engine.scheduler
        if any(isinstance(message, ResetPrefixCache) for message in inbox):
            self.model.epoch += 1
        aborts = [message for message in inbox if isinstance(message, Abort)]
        stopped = {id for message in aborts for id in message.request_ids} & self.live.keys()
        before = [
            (one, scheduler.num_wanted(one), one.num_preemptions) for one in scheduler.running if one.id not in stopped
        ]
        self.model.begin(fault)
        self.scheduled = []
        was_broken = self.model.broken
        suspicious = self._bad_steps >= 2
        doubtful = was_broken and suspicious and scheduler.pool.num_free
        out = self._engine_step(inbox, stopped, was_broken)
        if out is None:
            return
        if fault and self.scheduled:
            self.totals.faults[fault.kind] += 1
        try:
            self.engine.check()
        except AssertionError as failure:
            raise Violation(str(failure)) from failure
        self._told: dict[str, list[TokenOutput]] = {}
        for news in out.outputs:
            self._told.setdefault(news.request_id, []).append(news)
        # Where the engine doubts its model it reads the last results before it takes the inbox.
        late = sorted(stopped) if suspicious else []
        for id in sorted(stopped.difference(late)):
            self._check_end(id, "abort")
        self._check_schedule(before, out)
        collected = self._check_events(was_broken)
        for id in late:
            if self.clients[id].ended is None:
                self._check_end(id, "abort")
        unasked = [id for id, news in self._told.items() if news]
        must(not unasked, f"someone is told something and nothing happened: {unasked}")
        must(self.scheduled or collected or self.model.events or not self.live, "nothing runs although there is work")
        # One that was launched before may still be finite.
        if not self.model.silent:
            self._doubts += 1 if doubtful else -self._doubts
        must(self._doubts < 3, "nothing is finite any more, and the engine goes on")
        self.page_checks.check()
        self._check_counters(out)
        self._check_progress()
        self._check_emission()

    def _engine_step(self, inbox: Inbox, stopped: set[str], was_broken: bool) -> StepOutput | None:
        """The engine's step; None where the engine ended and was replaced."""
        try:
            return self.engine.step(self.now, inbox)
        except Died:
            self._replace_engine(stopped, "dies")
            return None
        except AiakqError as failure:
            must(was_broken and self._bad_steps >= 2, f"the engine gave up: {failure}")
            self._replace_engine(stopped, "gives up")
            return None
        except (Violation, KeyboardInterrupt):
            raise
        except BaseException as failure:
            raise Violation(f"{type(failure).__name__}: {failure}") from failure

    def abort_all(self) -> None:
        """Everybody leaves at once, as when a call of ``LLM`` is interrupted."""
        told = self.engine.abort_all()
        must({news.request_id for news in told} == set(self.live) and len(told) == len(self.live), "not all are told")
        must(all(news.finish_reason == "abort" for news in told), "not all are aborted")
        for client in list(self.live.values()):
            self._end(client, "abort")
        self.engine.check()
        must(not self.engine.has_work(), "something is left")

    def _replace_engine(self, stopped: set[str], how: str) -> None:
        """What the supervisor does: a new engine, which gets again what had no output yet."""
        if how == "dies":
            self.totals.faults[how] += 1
        for id in stopped:
            self._end(self.live[id], "abort")
        again = []
        for client in list(self.live.values()):
            client.deaths += 1
            if client.got or client.deaths >= DEATHS:
                self._end(client, "engine ended")
                continue
            client.alone = Alone(client.spec)
            client.computed = client.pending = 0
            client.starts = 1
            client.queried = client.started = client.counted = client.resample = False
            again.append(client.spec)
        self._start_engine()
        self.step([*again], None)

    def _end(self, client: Client, how: str) -> None:
        client.ended = how
        self.totals.ends[how] += 1
        del self.live[client.spec.request_id]

    # --- what must hold

    def _check_schedule(self, before: list[tuple[Sequence, int, int]], out: StepOutput) -> None:
        """The bounds of a step, its order, and that running answers go on."""
        scheduler, setup = self.engine.scheduler, self.setup
        rows = self.scheduled
        scheduled = sum(chunk.count for chunk in rows)
        must(
            scheduled <= setup.budget,
            f"{scheduled} tokens in a step of {setup.budget}",
        )
        must(scheduled == out.stats.num_scheduled_tokens, "the number of scheduled tokens is wrong")
        must(len(rows) <= setup.max_num_seqs >= len(scheduler.running), "too many sequences run")
        ids = {chunk.sequence.id for chunk in rows}
        for client, chunk in ((self.clients[chunk.sequence.id], chunk) for chunk in rows):
            if not client.queried:
                client.queried = True
                self._queried += len(client.spec.prompt_token_ids)
                self._hit += chunk.first
                self.totals.cached += chunk.first
        must(len(ids) == len(rows), "a sequence is twice in a step")
        ones = [chunk.count == 1 for chunk in rows]
        must(ones == sorted(ones, reverse=True), "decodes come first")
        answering = [one for one, missing, times in before if missing == 1 and one.num_preemptions == times]
        # One step ahead, the last results are read first where pages run short, and then some have ended.
        if self.setup.owners > 1:
            self.fairness_checks.check(before, rows, self._place)
            self._count_preempted(sum(one.num_preemptions > times for one, _, times in before))
            return
        served = [one.id in ids for one in answering if one.id in ids or one.id not in self._told]
        if setup.stages == 1 and sum(missing == 1 for _, missing, _ in before) <= setup.budget:
            must(all(served), "a running answer got no token")
        else:
            must(served == sorted(served, reverse=True), "a later answer got a token before an earlier one")
        # Who came first is served first, and who came last gives up its pages.
        known = {one for one, _, _ in before}
        admitted = [self._place(one) for one in scheduler.running if one not in known]
        victims = [self._place(one) for one, _, times in before if one.num_preemptions > times]
        if admitted and scheduler.waiting and not setup.overtaking:
            must(max(admitted) < min(map(self._place, scheduler.waiting)), "a request was overtaken")
        if victims:
            stayed = [self._place(one) for one, _, times in before if one.num_preemptions == times and one.id in ids]
            must(not stayed or max(stayed) < min(victims), "pages were taken from who came first")
        self._count_preempted(len(victims))

    def _count_preempted(self, number: int) -> None:
        self._preempted += number
        self.totals.preemptions += number

    def _check_events(self, was_broken: bool) -> bool:
        """What the model did in this step, in order; whether results were collected."""
        collected = False
        for event in self.model.events:
            if event is None:
                must(not was_broken, "nothing is finite any more, and the engine goes on")
                self._bad_steps = 0
            elif isinstance(event, Refused):
                self._check_row(event.row)
                self._check_end(event.row.id, "error", OUT_OF_MEMORY)
            elif isinstance(event[0], Row):
                for row in event:
                    self._check_row(row)
            else:
                collected = True
                self._check_collected(event)
        return collected

    def _check_row(self, row: Row) -> None:
        """A sequence's part of a step that runs."""
        client, first, P = self.clients[row.id], row.first, self.setup.page_size
        end = first + row.count - row.drafts
        spec = client.spec
        total = len(spec.prompt_token_ids) + client.got + client.pending
        cached = first != client.computed
        if not client.started:
            client.started = True
            must(
                first == 0 or (self.setup.caching and spec.sampling.prompt_logprobs is None),
                "cached although it must not be",
            )
        else:
            must(not cached or row.starts > client.starts, "positions were left out")
        if cached and first:
            must(first % P == 0 and first < total, f"{first} tokens cannot come from the cache")
            page = (row.epoch, spec.options.cache_salt, client.alone.entries[first - 1])
            must(page in self._pages, f"{row.id} may not find its pages")
        client.starts, client.computed = row.starts, end
        must(first < end <= total, "more tokens run than there are")
        room = len(spec.prompt_token_ids) + spec.max_tokens
        must(not row.drafts or end + row.drafts < room, "draft tokens exceed max_tokens")
        must(self.setup.scheduler.enable_chunked_prefill or end == total, "a prompt was split")
        must(row.samples == (end == total and spec.max_tokens > 0), "a token is sampled at the wrong time")
        client.pending += row.samples
        must(client.pending <= 1 or self.setup.ahead, "a token is sampled before the one before it")

    def _check_collected(self, collected: list[Collected]) -> None:
        """What became of a step: the right outputs for everyone in it."""
        for one in collected:
            client = self.clients[one.row.id]
            one.dropped = one.skipped or client.ended is not None
            must(not one.skipped or client.ended is not None or client.resample, f"{one.row.id} was left out")
        kept = [one for one in collected if not one.dropped]
        if any(one.row.samples and one.failed != NOT_FINITE for one in kept):
            self._bad_steps = 0
        elif any(one.failed == NOT_FINITE for one in kept):
            self._bad_steps += 1
        for one in kept:
            row, client = one.row, self.clients[one.row.id]
            spec = client.spec
            if one.failed:
                self._check_end(row.id, "error", one.failed)
                continue
            end = row.first + row.count - row.drafts
            client.pending -= row.samples
            client.resample = one.resample
            if one.resample:
                self._add_pages(row, client, end)
                # It goes back to the token before.
                client.computed, client.pending = len(spec.prompt_token_ids) + client.got - 1, 0
                continue
            if not client.counted and end >= len(spec.prompt_token_ids):
                client.counted = True
                self._prompted += len(spec.prompt_token_ids)
            if row.samples:
                accepted = self._check_tokens(client, one.num_tokens) - 1
                client.computed += accepted
                self.totals.drafts += row.drafts
                self.totals.accepted += accepted
                self._add_pages(row, client, end + accepted)
                continue
            self._add_pages(row, client, end)
            if end == len(spec.prompt_token_ids) and spec.max_tokens == 0:
                must(not self._check_end(row.id, "length").token_ids, f"{row.id} wanted no tokens")

    def _add_pages(self, row: Row, client: Client, end: int) -> None:
        """The full pages up to ``end`` may be found by others."""
        if row.epoch == self.model.epoch:
            P = self.setup.page_size
            ends = range((row.first // P + 1) * P, end + 1, P)
            self._pages |= {(row.epoch, client.spec.options.cache_salt, client.alone.entries[at - 1]) for at in ends}

    def _check_tokens(self, client: Client, count: int) -> int:
        """At most ``count`` tokens are what the request gets alone, and it ends as it does alone; returns how many."""
        id = client.spec.request_id
        tokens, logprobs, reason, stop = [], [], None, None
        while reason is None and len(tokens) < count:
            token, logprob, reason, stop = client.alone.next()
            tokens.append(token)
            logprobs.append(logprob)
        news = self._check_end(id, reason) if reason else self._next(id)
        must(news.token_ids == tokens and news.token_logprobs == logprobs, f"{id} got another answer than alone")
        must((news.finish_reason, news.stop_reason) == (reason, stop), f"{id} ended in another way than alone")
        must(news.error is None, f"{id} failed: {news.error}")
        if not client.got:
            self._check_prompt(client, news)
        client.got += len(tokens)
        self._generated += len(tokens)
        self.totals.tokens += len(tokens)
        self.trace = zlib.crc32(f"{id} {tokens}".encode(), self.trace)
        times = news.times
        must(times and times.scheduled is not None and times.last_token == self.now, f"{id} has wrong times")
        must(times.arrived <= times.scheduled <= times.first_token <= self.now, f"{id} has times in disorder")
        return len(tokens)

    def _check_prompt(self, client: Client, news: TokenOutput) -> None:
        """Log-probabilities of the prompt, which come once, for who wants them."""
        wanted = client.alone.prompt_logprobs() if client.spec.sampling.prompt_logprobs is not None else None
        must(news.prompt_logprobs == wanted, f"{client.spec.request_id}: other prompt log-probabilities")

    def _next(self, id: str) -> TokenOutput:
        """What ``id`` is told next in this step."""
        must(self._told.get(id), f"{id} is not told what became of it")
        return self._told[id].pop(0)

    def _check_end(self, id: str, reason: str, why: str | None = None) -> TokenOutput:
        """That ``id`` is told of its end, once and rightly."""
        client, news = self.clients[id], self._next(id)
        must(client.ended is None, f"{id} ends twice")
        must(news.finish_reason == reason, f"{id} ended by {news.finish_reason} instead of {reason}")
        must(news.error == why, f"{id} ended because {news.error}, not because {why}")
        if reason == "length" and client.spec.max_tokens == 0:
            self._check_prompt(client, news)
        self._end(client, reason)
        self.trace = zlib.crc32(f"{id} {reason}".encode(), self.trace)
        return news

    def _check_counters(self, out: StepOutput) -> None:
        stats, scheduler = out.stats, self.engine.scheduler
        self._worked += bool(self.scheduled)
        found = {
            "generation_tokens": (stats.generation_tokens, self._generated),
            "prompt_tokens": (stats.prompt_tokens, self._prompted),
            "preemptions": (stats.preemptions, self._preempted),
            "prefix_queries": (stats.prefix_queries, self._queried),
            "prefix_hits": (stats.prefix_hits, self._hit),
            "steps": (stats.steps, self._worked),
            "num_free_pages": (stats.num_free_pages, scheduler.pool.num_free),
            "num_running": (stats.num_running, len(scheduler.running)),
            "num_waiting": (stats.num_waiting, len(scheduler.waiting)),
            "live": (len(scheduler.running) + len(scheduler.waiting), len(self.live)),
        }
        for name, (told, counted) in found.items():
            must(told == counted, f"{name} is {told}, counted were {counted}")

    def _check_progress(self) -> None:
        """Nobody is first in line for longer than everything that runs can take."""
        if not self.live:
            self._head = None
            return
        head = min(self.live.values(), key=lambda client: client.place).spec.request_id
        if head != self._head:
            self._head, self._head_steps = head, 0
        self._head_steps += 1
        most = 4 * self.setup.max_len * self.setup.max_num_seqs * self.setup.owners
        must(self._head_steps <= most, f"{head} is first in line for {most} steps")

    def _check_emission(self) -> None:
        """While there is work, a token is told or a request ends within QUIET_STEPS steps."""
        emitted = self.totals.tokens, sum(self.totals.ends.values())
        moved = emitted != self._emitted or not self.live
        self._emitted = emitted
        self._quiet_steps = 0 if moved else self._quiet_steps + 1
        must(self._quiet_steps <= QUIET_STEPS, f"nobody is told anything for {QUIET_STEPS} steps")

    def _place(self, sequence: Sequence) -> tuple[int, int]:
        """In the order of service: by priority, then by arrival."""
        return self.clients[sequence.id].place
