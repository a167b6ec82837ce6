"""The engine under a seeded simulator: random traffic and faults, and after every step everything that must hold.

    python tests/simulation/simulator.py --steps 10000000        many worlds, one after the other
    python tests/simulation/simulator.py --seed 17 --steps 230   one again

A world is an engine of random sizes, its clients and what goes wrong. Arrivals, aborts, resets of the prefix cache,
faults and the clock each have a random source of their own, so that leaving one out (``--without``) leaves the others
as they are: that is how a world that fails is made smaller.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from model import ENDS, VOCAB, Alone, Died, Fault, PagedModel

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

#: What can be left out of a world.
PARTS = ("aborts", "resets", "faults", "priorities", "children", "ends")
#: Steps of a world before its clients stop, in a long run.
STEPS = 400
#: Part of the steps with traffic that carry a fault; of all, with those that end a world, it is more than 5 %.
FAULTS = 0.08
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
    """One engine, its clients, its faults."""

    def __init__(self, seed: int, without: Iterable[str] = (), totals: Totals | None = None) -> None:
        self.without = frozenset(without)
        self.setup = Setup.drawn(random.Random(f"{seed} setup"))
        self._draws = {
            name: random.Random(f"{seed} {name}") for name in ("arrivals", "aborts", "resets", "faults", "clock")
        }
        draw = self._draws["arrivals"]
        P, longest = self.setup.page_size, self.setup.max_len
        lengths = [min(longest - 2, max(1, draw.randint(0, longest // P) * P + draw.choice([-1, 0, 1]))) for _ in "abc"]
        self._beginnings = [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]
        self.totals = totals or Totals()
        self.totals.worlds += 1
        self.steps = 0
        self.trace = 0
        self.now = 0.0
        self.clients: dict[str, Client] = {}
        self.live: dict[str, Client] = {}
        self._ids = 0
        self._faulty = FAULTS
        self._start_engine()

    def run(self, steps: int) -> None:
        """``steps`` with traffic and faults, then as many as the clients need to be done."""
        for _ in range(steps):
            self.step(self._traffic(), self._fault())
        self._faulty = 0.0
        enough = sum(client.spec.max_tokens + len(client.spec.prompt_token_ids) for client in self.live.values())
        for _ in range(2 * enough + 2):
            if not self.live:
                break
            self.step([], None)
        must(not self.live, f"not done {2 * enough + 2} steps after the last request: {sorted(self.live)}")
        pool = self.engine.scheduler.pool
        must(pool.num_free == pool.num_usable, "a page is lost")

    # --- what happens

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

    def _traffic(self) -> Inbox:
        """What arrives before a step."""
        inbox: Inbox = []
        self.now += self._draws["clock"].choice([0.0, 0.001, 0.01, 0.01, 0.02, 1.0, 30.0])
        draw = self._draws["arrivals"]
        if draw.random() < self.setup.arriving and len(self.live) < self.setup.clients:
            inbox += self._request(draw)
        draw = self._draws["aborts"]
        if draw.random() < self.setup.aborting and self.clients and "aborts" not in self.without:
            # Of any age: waiting, running, just sent, ended, unknown; now and then twice.
            ids = [*self.live, f"r{self._ids - 1}", "unknown"]
            victim = Abort(draw.choice(ids))
            inbox += [victim] * draw.choice([1, 1, 2])
        if self._draws["resets"].random() < 0.01 and "resets" not in self.without:
            inbox.insert(0, ResetPrefixCache())
        return inbox

    def _request(self, draw: random.Random) -> list[RequestSpec]:
        """A request, or several that share their prompt."""
        longest = min(self.setup.max_len, self.engine.limits.max_kv_tokens)
        own = [draw.randrange(VOCAB) for _ in range(draw.choice([0, 1, 2, 3, 9]))]
        prompt = (draw.choice(self._beginnings) + own) if draw.random() < 0.6 else own
        prompt = (prompt or [draw.randrange(VOCAB)])[: longest - 1]
        room = longest - len(prompt)
        max_tokens = min(room, draw.choice([0, 1, 2, 5, 10, longest]))
        ends = "ends" not in self.without
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, draw.choice([0, 0, 0, 3])),
            seed=draw.randrange(3),
            ignore_eos=draw.random() < 0.5 or not ends,
            stop_token_ids=draw.sample(range(1, ENDS), 3) if draw.random() < 0.5 and ends else None,
            prompt_logprobs=0 if draw.random() < 0.08 else None,
        )
        priority = draw.choice([0, 0, 0, -1, 2])
        count = draw.choice([1, 1, 1, 1, 2, 4])
        count = 1 if "children" in self.without else count
        priority = 0 if "priorities" in self.without else priority
        specs = []
        for index in range(count):
            spec = admit(f"r{self._ids}", prompt, params, self.engine.limits, index, priority=priority)
            self._ids += 1
            self.clients[spec.request_id] = self.live[spec.request_id] = Client(
                spec, Alone(spec), (priority, self._ids)
            )
            specs.append(spec)
        self.totals.requests += count
        return specs

    def _fault(self) -> Fault | None:
        draw = self._draws["faults"]
        kind, place = draw.choice(["row", "row", "poison", "all", "dies"]), draw.random()
        twice = self._bad_steps and draw.random() < 0.3
        if (draw.random() < self._faulty or twice) and "faults" not in self.without:
            return Fault("all" if twice else kind, place)
        return None

    def step(self, inbox: Inbox, fault: Fault | None) -> None:
        """One step, and everything that must hold after it."""
        self.steps += 1
        self.totals.steps += 1
        scheduler = self.engine.scheduler
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
        for id, *row in rows:
            client = self.live.get(id)
            must(client, f"{id} has ended and still runs")
            self._check_row(client, *row)

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
        client.preempted = preempted
        must(0 < count and first + count <= total, "more tokens run than there are")
        must(self.setup.rules.chunked or first + count == total, "a prompt was split")
        must(drawn == (first + count == total and spec.max_tokens > 0), "a token is drawn at the wrong time")
        if spec.request_id not in self._refused():
            client.computed = first + count
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


def line(seed: int, steps: int, without: Iterable[str]) -> str:
    """What repeats a world."""
    left_out = f" --without {','.join(sorted(without))}" if without else ""
    return f"python tests/simulation/simulator.py --seed {seed} --steps {steps}{left_out}"


def violation(seed: int, steps: int, without: Iterable[str] = ()) -> tuple[int, str] | None:
    """The step in which a world fails, and how; None if it does not."""
    world = World(seed, without)
    try:
        world.run(steps)
    except Violation as failure:
        return min(world.steps, steps), str(failure)
    return None


def smallest(seed: int, steps: int) -> tuple[int, list[str], str]:
    """A world that fails, with as much left out as can be: its steps, what is left out, and how it fails."""
    found = violation(seed, steps)
    assert found is not None, "the world does not fail"
    without: list[str] = []
    for part in PARTS:
        shorter = violation(seed, found[0], [*without, part])
        if shorter is not None:
            found, without = shorter, [*without, part]
    return found[0], without, found[1]


def main() -> int:
    """The command line; the exit code says whether everything held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, help="one world; without it, as many as --steps asks for")
    parser.add_argument("--first", type=int, default=0, help="the first seed of many")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--without", default="", help=f"of {','.join(PARTS)}, for one world")
    asked = parser.parse_args()
    without = [part for part in asked.without.split(",") if part]
    totals = Totals()
    began = told = time.monotonic()
    seed = asked.first if asked.seed is None else asked.seed
    while True:
        world = World(seed, without, totals)
        steps = STEPS if asked.seed is None else asked.steps
        try:
            world.run(steps)
        except Violation as failure:
            print(f"seed {seed}, step {world.steps}: {failure}", flush=True)
            if asked.seed is None:
                at, left_out, how = smallest(seed, steps)
                print(f"{line(seed, at, left_out)}   # {how}", flush=True)
            return 1
        seed += 1
        now = time.monotonic()
        done = asked.seed is not None or totals.steps >= asked.steps
        if done or now - told > 30:
            told = now
            print(f"{totals}; {totals.steps / (now - began):.0f} steps/s, seeds to {seed - 1}", flush=True)
        if done:
            return 0


if __name__ == "__main__":
    sys.exit(main())
