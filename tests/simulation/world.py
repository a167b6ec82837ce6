"""An engine of given sizes, its clients, and after every step everything that must hold."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field

from model import VOCAB, Alone, Died, Fault, PagedModel

from aiakq.errors import AiakqError
from aiakq.runtime.engine import Engine
from aiakq.runtime.messages import (
    Abort,
    Inbox,
    ModelLimits,
    RequestSpec,
    ResetPrefixCache,
    StepOutput,
    TokenOutput,
    admit,
)
from aiakq.runtime.pages import PagePool
from aiakq.runtime.sampling import SamplingParams
from aiakq.runtime.scheduler import PromptRules, Scheduler
from aiakq.runtime.sequence import Sequence

#: Deaths of the engine that a request may take part in; as in the server's table.
DEATHS = 2


class Violation(AssertionError):
    """Something that must hold does not."""


def must(holds: object, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass
class Setup:
    """The sizes of a world."""

    page_size: int
    num_pages: int
    max_len: int
    max_num_seqs: int
    budget: int
    caching: bool
    rules: PromptRules
    clients: int
    arriving: float
    aborting: float

    @staticmethod
    def drawn(draw: random.Random) -> Setup:
        page_size = draw.choice([1, 2, 4, 4, 4, 8, 16])
        max_len = draw.choice([12, 24, 24, 40])
        pages = -(-max_len // page_size)
        chunked = draw.random() < 0.8
        together = draw.choice([1, 1, 3]) if chunked else 1
        return Setup(
            page_size=page_size,
            # From a famine, in which one request of the greatest length just fits, to plenty.
            num_pages=1 + pages + draw.choice([0, 0, 1, pages // 2, pages, 3 * pages]),
            max_len=max_len,
            max_num_seqs=draw.choice([1, 2, 4, 8]),
            budget=draw.choice([1, 3, 8, 16, 64]) if chunked else draw.choice([max_len, 2 * max_len]),
            caching=draw.random() < 0.75,
            rules=PromptRules(
                chunked=chunked,
                together=together,
                long_together=draw.randint(1, together),
                long_prompt=draw.choice([0, 0, 6]),
                long_chunk=draw.choice([0, 0, 5]),
                delay=draw.choice([0.0, 0.0, 0.5, 4.0]),
            ),
            clients=draw.choice([2, 5, 12]),
            arriving=draw.choice([0.1, 0.3, 1.0]),
            aborting=draw.choice([0.0, 0.02, 0.1]),
        )

    @property
    def overtaking(self) -> bool:
        """Whether short prompts may overtake long ones."""
        return bool(self.rules.long_prompt) and self.rules.long_together < self.rules.together


@dataclass(eq=False)
class Client:
    """One request, as who sent it sees it."""

    spec: RequestSpec
    alone: Alone
    place: tuple[int, int]
    got: int = 0
    ended: str | None = None
    deaths: int = 0
    #: In the life of the engine that runs now.
    computed: int = 0
    started: bool = False
    counted: bool = False
    preempted: int = 0


@dataclass
class Totals:
    """What was seen, for the last line of a run."""

    steps: int = 0
    worlds: int = 0
    requests: int = 0
    tokens: int = 0
    preemptions: int = 0
    cached: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(self.ends.items()))
        return (
            f"{self.steps} steps in {self.worlds} worlds: {self.requests} requests ({ends}), {self.tokens} tokens, "
            f"{self.cached} of prompts from the cache, {self.preemptions} preemptions, "
            f"{sum(self.faults.values())} faults ({faults})"
        )


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
        self.steps = 0
        self.trace = 0
        self.now = 0.0
        self.clients: dict[str, Client] = {}
        self.live: dict[str, Client] = {}
        self._start_engine()

    def _start_engine(self) -> None:
        setup = self.setup
        self.model = PagedModel(setup.num_pages, setup.page_size)
        pool = PagePool(setup.num_pages, setup.page_size, setup.caching)
        limits = ModelLimits(
            VOCAB, setup.max_len, pool.num_usable * setup.page_size, eos_token_ids=(0,), by_priority=True
        )
        scheduler = Scheduler(pool, setup.max_num_seqs, setup.budget, setup.rules)
        self.engine = Engine(self.model, scheduler, limits, {})  # type: ignore[arg-type]
        self._generated = self._prompted = self._preempted = self._queried = self._hit = self._worked = 0
        self._bad_steps = 0
        self._head: str | None = None
        self._head_steps = 0
        # What was computed since the prefix cache was empty: salt and what the last position of a page holds.
        self._pages: set[tuple[str, int]] = set()

    def ask(
        self, prompt: list[int], params: SamplingParams, count: int = 1, priority: int = 0, salt: str = ""
    ) -> list[RequestSpec]:
        """A request, or several that share their prompt: what to put into an inbox."""
        specs = []
        for index in range(count):
            number = len(self.clients)
            spec = admit(f"r{number}", prompt, params, self.engine.limits, index, priority=priority, cache_salt=salt)
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
            self._pages.clear()
        stopped = {message.request_id for message in inbox if isinstance(message, Abort)} & self.live.keys()
        before = [(one, one.num_missing, one.num_preemptions) for one in scheduler.running if one.id not in stopped]
        self.model.fault, self.model.limit = fault, None
        self.model.calls.clear()
        try:
            out = self.engine.step(self.now, inbox)
        except Died:
            must(fault and fault.kind == "dies", "the engine died by itself")
            self._replace_engine(stopped, "dies")
            return
        except AiakqError as failure:
            self._count_bad_rows()
            must(self._bad_steps >= 2, f"the engine gave up: {failure}")
            self._replace_engine(stopped, "gives up")
            return
        except (Violation, KeyboardInterrupt):
            raise
        except BaseException as failure:
            raise Violation(f"{type(failure).__name__}: {failure}") from failure
        if fault and self.model.calls:
            self.totals.faults[fault.kind] += 1
        self._count_bad_rows()
        # must(self._bad_steps < 2, "no row was finite twice in a row, and the engine goes on")
        try:
            self.engine.check()
        except AssertionError as failure:
            raise Violation(str(failure)) from failure
        self._check_pages()
        self._check_schedule(before, out)
        self._check_answers(out, stopped)
        self._check_counters(out)
        self._check_progress()

    def _replace_engine(self, stopped: set[str], how: str) -> None:
        """What the supervisor does: a new engine, which gets again what had no output yet."""
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
            client.computed = client.preempted = 0
            client.started = client.counted = False
            again.append(client.spec)
        self._start_engine()
        self.step([*again], None)

    def _end(self, client: Client, how: str) -> None:
        client.ended = how
        self.totals.ends[how] += 1
        del self.live[client.spec.request_id]

    # --- what must hold

    def _count_bad_rows(self) -> None:
        """Two steps of several rows in a row in which none was finite end an engine."""
        drawn = [row for call in self.model.calls for row in call.rows if row[3]]
        failed = self._failed()
        answered = len({id for id, *_ in drawn}) - len(failed) - len(self._refused())
        if answered:
            self._bad_steps = 0
        elif len(failed) > 1:
            self._bad_steps += 1

    def _failed(self) -> set[str]:
        """Whose rows were not finite."""
        return {id for call in self.model.calls for id in call.failed}

    def _refused(self) -> set[str]:
        """Who does not fit into memory even alone."""
        limit = self.model.limit
        if limit is None or not self.model.calls:
            return set()
        return {id for id, _, count, *_ in self.model.calls[0].rows if count > limit}

    def _check_pages(self) -> None:
        """No page is lost, and only full pages are shared; who waits has none."""
        scheduler, P = self.engine.scheduler, self.setup.page_size
        at: dict[int, int] = {}
        for sequence in scheduler.running:
            pages = sequence.pages
            must(len(pages) <= -(-len(sequence.token_ids) // P), "more pages than tokens")
            full = sequence.num_computed // P
            for index, page in enumerate(pages):
                if page in at:
                    must(at[page] == index and index < full, f"page {page} is in two places")
                else:
                    at[page] = index if index < full else -1
        must(not any(sequence.pages for sequence in scheduler.waiting), "who waits holds pages")
        must(scheduler.pool.num_free + len(at) == scheduler.pool.num_usable, "free and held pages are not all")
        for call in self.model.calls:
            for id, (pages, written) in call.failed.items():
                for page in pages:
                    must(scheduler.pool._hashes[page] is None, f"a page of {id}, which failed, can still be found")
                for page in written:
                    must(page in at or not any(self.model.pages[page]), f"a page of {id}, which failed, is not cleared")

    def _check_schedule(self, before: list[tuple[Sequence, int, int]], out: StepOutput) -> None:
        """The bounds of a step, its order, and that running answers go on."""
        scheduler, setup = self.engine.scheduler, self.setup
        rows = self.model.calls[0].rows if self.model.calls else []
        scheduled = sum(count for _, _, count, *_ in rows)
        must(scheduled <= setup.budget, f"{scheduled} tokens in a step of {setup.budget}")
        must(scheduled == out.stats.num_scheduled_tokens, "the number of scheduled tokens is wrong")
        must(len(rows) <= setup.max_num_seqs >= len(scheduler.running), "too many sequences run")
        ids = {id for id, *_ in rows}
        must(len(ids) == len(rows), "a sequence is twice in a step")
        must(rows or not self.live or out.outputs, "nothing runs although there is work")
        counts = [count for _, _, count, *_ in rows]
        must(counts == sorted(counts, key=lambda count: count > 1), "decodes come first")
        answering = [one for one, missing, times in before if missing == 1 and one.num_preemptions == times]
        if sum(missing == 1 for _, missing, _ in before) <= setup.budget:
            must(all(one.id in ids for one in answering), "a running answer got no token")
        elif len(answering) > 1:
            must([one.id in ids for one in answering] == sorted((one.id in ids for one in answering), reverse=True),
                 "a later answer got a token before an earlier one")  # fmt: skip
        # Who came first is served first, and who came last gives up its pages.
        known = {one for one, _, _ in before}
        admitted = [self._place(one) for one in scheduler.running if one not in known]
        victims = [self._place(one) for one, _, times in before if one.num_preemptions > times]
        if admitted and scheduler.waiting and not setup.overtaking:
            must(max(admitted) < min(map(self._place, scheduler.waiting)), "a request was overtaken")
        if victims:
            stayed = [self._place(one) for one, _, times in before if one.num_preemptions == times and one.id in ids]
            must(not stayed or max(stayed) < min(victims), "pages were taken from who came first")
            self._preempted += len(victims)
            self.totals.preemptions += len(victims)
        self._fresh: set[tuple[str, int]] = set()
        for id, *row in rows:
            client = self.live.get(id)
            must(client, f"{id} has ended and still runs")
            self._check_row(client, *row)
        self._pages |= self._fresh

    def _check_row(self, client: Client, first: int, count: int, drawn: bool, preempted: int) -> None:
        spec = client.spec
        total = len(spec.prompt_token_ids) + client.got
        if not client.started:
            client.started = True
            must(first % self.setup.page_size == 0 and first < total, f"{first} tokens cannot come from the cache")
            must(first == 0 or (self.setup.caching and spec.prompt_logprobs is None), "cached although it must not be")
            self._queried += len(spec.prompt_token_ids)
            self._hit += first
            self.totals.cached += first
        elif first != client.computed:
            must(preempted > client.preempted and first % self.setup.page_size == 0, "positions were left out")
        if first != client.computed and first:
            known = spec.cache_salt, client.alone.entries[first - 1]
            must(known in self._pages, f"{spec.request_id} got pages that it must not find")
        client.preempted = preempted
        must(0 < count and first + count <= total, "more tokens run than there are")
        must(self.setup.rules.chunked or first + count == total, "a prompt was split")
        must(drawn == (first + count == total and spec.max_tokens > 0), "a token is drawn at the wrong time")
        if spec.request_id not in self._refused():
            client.computed = first + count
            P = self.setup.page_size
            for end in range((first // P + 1) * P, client.computed + 1, P):
                self._fresh.add((spec.cache_salt, client.alone.entries[end - 1]))
            failed = self._failed()
            if not client.counted and spec.request_id not in failed and client.computed >= len(spec.prompt_token_ids):
                client.counted = True
                self._prompted += len(spec.prompt_token_ids)

    def _check_answers(self, out: StepOutput, stopped: set[str]) -> None:
        """Every answer is what the request gets alone; everyone is told once of the end, and of the right one."""
        failed = self._failed()
        refused = self._refused()
        must(len({news.request_id for news in out.outputs}) == len(out.outputs), "a request has news twice in a step")
        told = {news.request_id: news for news in out.outputs}
        due = {id for id, _, _, drawn, _ in (self.model.calls[0].rows if self.model.calls else ()) if drawn}
        must(told.keys() >= due | stopped | refused, "someone is not told")
        for id, news in told.items():
            client = self.clients.get(id)
            must(client is not None and client.ended is None, f"{id} is told something after its end")
            assert client is not None
            self.trace = zlib.crc32(f"{id} {news.token_ids} {news.finish_reason}".encode(), self.trace)
            if id in stopped:
                must(news.finish_reason == "abort" and not news.token_ids, f"{id} was aborted and goes on")
            elif id in failed:
                must(news.finish_reason == "error" and "finite" in (news.error or ""), f"{id} should have failed")
            elif id in refused:
                must(news.finish_reason == "error" and "memory" in (news.error or ""), f"{id} should have failed")
            else:
                self._check_tokens(client, news)
            if news.prompt_logprobs is not None and news.error is None:
                must(news.prompt_logprobs == client.alone.prompt_logprobs(), f"{id}: other prompt log-probabilities")
            if news.finish_reason is not None:
                self._end(client, news.finish_reason)

    def _check_tokens(self, client: Client, news: TokenOutput) -> None:
        spec, id = client.spec, client.spec.request_id
        must(news.error is None, f"{id} failed: {news.error}")
        if spec.max_tokens == 0:
            must(not news.token_ids and news.finish_reason == "length", f"{id} wanted no tokens")
            must(client.computed == len(spec.prompt_token_ids), f"{id} ended before its prompt was computed")
        else:
            token, logprob, reason, stop = client.alone.next()
            must(news.token_ids == [token] and news.token_logprobs == [logprob], f"{id} got another answer than alone")
            must((news.finish_reason, news.stop_reason) == (reason, stop), f"{id} ended in another way than alone")
            client.got += 1
            self._generated += 1
            self.totals.tokens += 1
        if client.got <= 1 and spec.prompt_logprobs is not None:
            must(news.prompt_logprobs is not None, f"{id} got no prompt log-probabilities")
        times = news.times
        must(times is not None and times.scheduled is not None, f"{id} has no times")
        must(times.arrived <= times.scheduled <= (times.last_token or self.now) <= self.now, f"{id}: times in disorder")

    def _check_counters(self, out: StepOutput) -> None:
        stats, scheduler = out.stats, self.engine.scheduler
        self._worked += bool(self.model.calls)
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
        most = 4 * self.setup.max_len * self.setup.max_num_seqs
        must(self._head_steps <= most, f"{head} is first in line for {most} steps")

    def _place(self, sequence: Sequence) -> tuple[int, int]:
        """In the order of service: by priority, then by arrival."""
        return self.clients[sequence.id].place
