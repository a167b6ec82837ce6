"""StepBuilder: fills one step with tokens of running and waiting sequences, in turns of their clients.

In a turn a client gets one decode token, or tokens of a prompt. Decodes come first, then running prompts, then waiting
sequences; ``ClientShares`` says whose turn it is. A single client gets as many tokens of a prompt as the step holds.
Where there are several:

- Prompts are served in pieces of ``QUANTUM`` tokens.
- While sequences decode, the number of tokens is limited such that the step's estimated time does not exceed that of a
  step with one token per client plus ``STRETCH - 1`` times that of a single token. Otherwise the prompts of one client
  would slow down the decoding of others, however small their share of tokens, because a step lasts as long as all of
  its tokens take.
- A client without running sequences may preempt the last sequence of a client with several running sequences.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.client_shares import OUTPUT_WEIGHT, ClientShares
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.sequence import ScheduledChunk, ScheduledDecodes, ScheduledStep, Sequence, SteadySequences
from aiakq.runtime.engine.step_times import StepTimes

#: Maximum number of prompt tokens that one of several clients gets per turn.
QUANTUM = 16
#: Factor by which steps may be slower while clients share them, and the token limit until step times are known.
STRETCH = 3.0
FIRST_LIMIT = 64
_SLOT = attrgetter("slot")


class Queues(Protocol):
    """The sequences of which a step is made, and what they take: ``Scheduler`` has them."""

    config: SchedulerConfig
    pool: PagePool
    running: list[Sequence]
    waiting: list[Sequence]
    clients: ClientShares
    step_times: StepTimes
    budget: int
    max_num_seqs: int
    min_columns: int
    steady: SteadySequences | None

    def num_wanted(self, sequence: Sequence) -> int:
        """Return the tokens of a running sequence that could be computed in this step."""

    def admits(self, sequence: Sequence) -> bool:
        """Return whether every resource lets a waiting sequence start; slots and pages aside."""

    def shared_pages(self, sequence: Sequence) -> list[int]:
        """Return the cached pages of an equal beginning."""

    def start(self, sequence: Sequence, shared: list[int], count: int) -> None:
        """Let a waiting sequence run, with the cached pages ``shared`` and those for ``count`` tokens."""

    def preempt(self, sequence: Sequence) -> None:
        """Stop a running sequence, which starts over later."""


@dataclass
class _Demand:
    """What a client wants of a step: ``decodes`` are served first, then prompts, then waiting sequences.

    charged     weighted tokens that the client got in this step.
    partial     number of prompts that have begun and are incomplete.
    long        number of long prompts among them.
    is_blocked  whether its waiting sequences lack slots or pages.
    """

    client: str
    decodes: deque[Sequence] = field(default_factory=deque)
    prompts: deque[Sequence] = field(default_factory=deque)
    waiting: deque[Sequence] = field(default_factory=deque)
    num_running: int = 0
    charged: int = 0
    partial: int = 0
    long: int = 0
    is_blocked: bool = False

    @property
    def next(self) -> Sequence | None:
        """The sequence that is served next."""
        for queue in (self.decodes, self.prompts, self.waiting):
            if queue:
                return queue[0]
        return None


class StepBuilder:
    """A step that is being filled.

    num_decodes  maximum number of decode tokens.
    num_tokens   maximum number of tokens.
    waited       whether waiting sequences may start.
    """

    def __init__(self, scheduler: Queues, num_decodes: int, num_tokens: int, waited: bool) -> None:
        self._scheduler = scheduler
        self._config = scheduler.config
        self._pool = scheduler.pool
        self._running = scheduler.running
        self._demands = self._demands_of_clients(waited)
        self._decodes_left = num_decodes
        self._tokens_left = min(num_tokens, self._max_tokens()) if len(self._demands) > 1 else num_tokens
        self._quantum = QUANTUM
        self._counts: dict[Sequence, int] = {}  # tokens by sequence
        self._started: set[Sequence] = set()
        self._has_preempted = False  # in this step
        self._admits = True  # whether waiting sequences may still start
        self._reserved_pages: int | None = None  # pages that running sequences lack; None: not counted yet

    def step(self, has_columns: bool) -> ScheduledStep:
        """Fill the step. Sequences are started and preempted, and pages allocated; clients are charged.

        has_columns  whether steady sequences may get columns instead of chunks.
        """
        demands = self._demands
        if len(demands) == 1:
            (demand,) = demands
            self._serve_decodes(demand, self._tokens_left)
            self._quantum = self._share(demand)
            while demand.next and self._tokens_left > 0:
                self._serve(demand)
        else:
            self._serve_in_turns()
        if len(demands) > 1:
            self._charge()
        counts = self._counts
        steady = [sequence for sequence in counts if sequence.is_steady] if has_columns else []
        if not steady or len(steady) < self._scheduler.min_columns:
            return ScheduledStep([ScheduledChunk.of(*counted) for counted in counts.items()])
        # What depends only on which sequences there are need not be done again, so their order is constant.
        steady.sort(key=_SLOT)
        others: list[ScheduledChunk] = []
        if len(steady) < len(counts):
            others = [ScheduledChunk.of(*counted) for counted in counts.items() if not counted[0].is_steady]
        return ScheduledStep(others, ScheduledDecodes(steady, self._scheduler.steady))

    def _serve_in_turns(self) -> None:
        """Serve the client with the lowest counter, until nothing is wanted or left."""
        # Decodes first, up to a number that is certainly within each client's share of the step.
        quota = self._tokens_left // (2 * max(1, len(self._demands)))
        for demand in sorted(self._demands, key=self._rank):
            self._serve_decodes(demand, quota)
        heap = [(self._rank(demand), demand) for demand in self._demands if demand.next]
        heapq.heapify(heap)
        while heap and self._tokens_left > 0:
            demand = heap[0][1]
            self._serve(demand)
            if demand.next:
                heapq.heapreplace(heap, (self._rank(demand), demand))
            else:
                heapq.heappop(heap)

    def _demands_of_clients(self, waited: bool) -> list[_Demand]:
        scheduler = self._scheduler
        demands = {client: _Demand(client) for client in scheduler.clients}
        has_stages = self._config.num_stages > 1
        running = self._running
        if len(demands) == 1 and not has_stages:  # in fewer operations than those below
            (demand,) = demands.values()
            steady = [one for one in running if one.is_steady]
            demand.decodes += [one for one in steady if one.num_computed_tokens < one.num_needed_tokens]
            demand.num_running = len(steady)
            running = [one for one in running if not one.is_steady] if len(steady) < len(running) else []
        for sequence in running:
            demand = demands[sequence.client]
            demand.num_running += 1
            if sequence.is_steady and not has_stages:
                if sequence.num_computed_tokens < sequence.num_needed_tokens:
                    demand.decodes.append(sequence)
                continue
            uncomputed = scheduler.num_wanted(sequence)
            if uncomputed > 1:
                demand.prompts.append(sequence)
                demand.partial += 1
                demand.long += self._is_long(uncomputed)
            elif uncomputed:
                demand.decodes.append(sequence)
        if waited:
            for sequence in scheduler.waiting:
                demands[sequence.client].waiting.append(sequence)
        return list(demands.values())

    def _max_tokens(self) -> int:
        """Return the maximum number of tokens of a step that clients share."""
        budget, num_clients = self._scheduler.budget, len(self._demands)
        if not self._config.enable_chunked_prefill or not any(demand.decodes for demand in self._demands):
            return budget
        limit = self._scheduler.step_times.max_tokens(num_clients, STRETCH)
        return max(FIRST_LIMIT if limit is None else limit, 4 * num_clients)

    def _share(self, demand: _Demand) -> int:
        """Return the maximum tokens of a prompt of the only client: a share of those left if several are split."""
        prompts = min(self._config.max_num_partial_prefills, len(demand.prompts) + len(demand.waiting))
        return max(1, self._tokens_left // max(1, prompts))

    def _is_long(self, uncomputed: int) -> bool:
        return 0 < self._config.long_prompt_tokens < uncomputed

    def _piece(self, sequence: Sequence, uncomputed: int, begin: int) -> int:
        """Return the number of prompt tokens of ``sequence`` for one turn.

        begin  the first uncomputed one; those that are already in this step follow.
        """
        config, done = self._config, self._counts.get(sequence, 0)
        if not config.enable_chunked_prefill:
            return uncomputed if uncomputed <= self._tokens_left else 0
        count = min(uncomputed - done, self._tokens_left, self._quantum)
        if config.long_prefill_token_threshold and self._is_long(uncomputed):
            count = min(count, config.long_prefill_token_threshold - done)
        count = max(0, count)
        if sequence.whole_runs:
            # An image is not split, even if its tokens are more than the client's share of the step.
            begin += done
            limit = begin + max(count, self._scheduler.budget - sum(self._counts.values()))
            return sequence.chunk_end(begin, begin + count, limit) - begin
        return count

    def _rank(self, demand: _Demand) -> tuple[object, ...]:
        """Return the sort key of a client; the smallest is served first.

        Ties are broken by the number of running sequences, then by order of arrival.
        """
        first = demand.next
        priority, number = first.order if first else (0, 0)
        served = self._scheduler.clients.counters[demand.client] + demand.charged
        return priority, served, demand.num_running, number, demand.client

    # --- one turn of a client

    def _serve(self, demand: _Demand) -> None:
        """Add one piece of the client's demand to the step, or drop demand that cannot be served in it."""
        if demand.decodes:
            self._serve_decodes(demand, 1)
        elif demand.waiting and (not demand.prompts or demand.partial < self._config.max_num_partial_prefills):
            self._begin(demand)
        else:
            sequence = demand.prompts.popleft()
            count = self._piece(sequence, sequence.num_uncomputed_tokens, sequence.num_computed_tokens)
            if count and self._extend(sequence, count, demand):
                self._requeue(sequence, demand)

    def _serve_decodes(self, demand: _Demand, limit: int) -> None:
        """Add up to ``limit`` decodes of the client."""
        limit = min(limit, len(demand.decodes))
        if len(demand.decodes) == limit <= self._decodes_left and self._serve_all_decodes(demand):
            return
        for _ in range(limit):
            sequence = demand.decodes.popleft()
            if self._decodes_left > 0:
                self._decodes_left -= 1
                self._extend(sequence, 1, demand)

    def _serve_all_decodes(self, demand: _Demand) -> bool:
        """Add all decodes of the client, of which none is in the step yet; False if there are too few pages."""
        decodes, pool = demand.decodes, self._pool
        size = pool.page_size
        growing = [sequence for sequence in decodes if sequence.num_computed_tokens >= len(sequence.pages) * size]
        if len(growing) > pool.num_free or self._has_preempted:
            return False
        for sequence in growing:
            pool.extend(sequence.pages, sequence.num_computed_tokens + 1)
        if self._reserved_pages is not None:
            self._reserved_pages -= len(growing)
        self._counts.update(dict.fromkeys(decodes, 1))
        self._decodes_left -= len(decodes)
        self._tokens_left -= len(decodes)
        demand.charged += OUTPUT_WEIGHT * len(decodes)
        decodes.clear()
        return True

    def _requeue(self, sequence: Sequence, demand: _Demand) -> None:
        """Requeue an incomplete prompt, so that it alternates with the client's other prompts in this step."""
        if self._counts[sequence] == sequence.num_uncomputed_tokens:
            demand.partial -= 1
        else:
            demand.prompts.append(sequence)

    def _extend(self, sequence: Sequence, count: int, demand: _Demand) -> bool:
        """Add ``count`` tokens of ``sequence`` to the step, preempting other sequences if pages run out.

        Returns False if ``sequence`` was preempted itself.
        """
        if sequence.slot is None:  # preempted in this step
            return False
        total = self._counts.get(sequence, 0) + count
        num_pages = len(sequence.pages)
        while not self._pool.extend(sequence.pages, sequence.num_computed_tokens + total):
            victim = self._last(self._running[1:] or self._running)
            self._take_out(victim)
            if victim is sequence:
                return False
        if self._reserved_pages is not None:
            self._reserved_pages -= len(sequence.pages) - num_pages
        self._tokens_left -= count
        self._counts[sequence] = total
        demand.charged += OUTPUT_WEIGHT if sequence.num_uncomputed_tokens == 1 else count
        return True

    def _begin(self, demand: _Demand) -> None:
        """Start the next waiting sequence of the client. If it does not fit, no other sequence starts in this step."""
        scheduler, config = self._scheduler, self._config
        sequence = demand.waiting.popleft()
        if not scheduler.admits(sequence):
            return
        shared = scheduler.shared_pages(sequence)
        uncomputed = len(sequence.token_ids) - len(shared) * self._pool.page_size
        is_long = self._is_long(uncomputed)
        if is_long and demand.long >= config.max_long_partial_prefills < config.max_num_partial_prefills:
            return
        count = self._piece(sequence, uncomputed, len(sequence.token_ids) - uncomputed)
        if count < uncomputed and demand.partial >= config.max_num_partial_prefills:
            demand.waiting.clear()
            return
        if not self._admits or not count or not self._make_room(sequence, shared, demand):
            demand.is_blocked = count > 0
            self._admits = False
            demand.waiting.clear()
            return
        scheduler.start(sequence, shared, count)
        if self._reserved_pages is not None:
            self._reserved_pages += self._pool.pages_for(len(sequence.token_ids)) - len(sequence.pages)
        self._started.add(sequence)
        self._tokens_left -= count
        self._counts[sequence] = count
        demand.num_running += 1
        demand.long += is_long
        demand.partial += 1
        demand.charged += count
        self._requeue(sequence, demand)

    def _charge(self) -> None:
        """Charge every client for the step. Clients that only wait for slots or pages count as served."""
        scheduler = self._scheduler
        blocked = {demand.client for demand in self._demands if demand.is_blocked}
        unserved = {sequence.client for sequence in scheduler.waiting} - blocked
        for sequence in self._running:
            if scheduler.num_wanted(sequence) > self._counts.get(sequence, 0):
                unserved.add(sequence.client)
        weights = []
        for sequence, count in self._counts.items():
            weights.append((sequence.client, OUTPUT_WEIGHT if sequence.num_uncomputed_tokens == 1 else count))
        scheduler.clients.charge(weights, unserved)

    # --- slots and pages

    def _make_room(self, sequence: Sequence, shared: list[int], demand: _Demand) -> bool:
        """Return whether there are a slot and pages for all of ``sequence``.

        If its client has no running sequence, sequences of other clients are preempted to make room.
        """
        if self._has_room(sequence, shared):
            return True
        if demand.num_running:
            return False
        victims = self._others(sequence)
        pages = sum(len(victim.pages) for victim in victims) + self._pool.num_free
        if pages < self._pool.pages_for(len(sequence.token_ids)):
            return False
        while victims and not self._has_room(sequence, shared):
            self._take_out(self._last(victims))
            victims = self._others(sequence)
        return self._has_room(sequence, shared)

    def _has_room(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether there are a slot and pages for all of ``sequence``, besides what running sequences still need: half a
        prompt that cannot continue would only block others.
        """
        if len(self._running) >= self._scheduler.max_num_seqs:
            return False
        if self._reserved_pages is None:
            self._reserved_pages = 0
            for other in self._running:
                total = other.num_computed_tokens + other.num_uncomputed_tokens
                self._reserved_pages += max(0, self._pool.pages_for(total) - len(other.pages))
        needed = self._pool.pages_for(len(sequence.token_ids)) - len(shared) + self._pool.num_idle(shared)
        return needed + self._reserved_pages <= self._pool.num_free

    def _others(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that may be preempted for ``sequence``.

        They belong to clients with several running sequences of which none started in this step. The first running
        sequence is never among them.
        """
        running = Counter(other.client for other in self._running)
        for started in self._started:
            del running[started.client]
        others = [other for other in self._running[1:] if running[other.client] > 1]
        return [other for other in others if other.spec.options.priority >= sequence.spec.options.priority]

    def _last(self, candidates: list[Sequence]) -> Sequence:
        """Return the sequence to preempt: the last one of the client that holds the most pages.

        Callers exclude the first running sequence, which guarantees progress.
        """
        held: Counter[str] = Counter()
        for sequence in self._running:
            held[sequence.client] += len(sequence.pages)
        return max(
            candidates, key=lambda sequence: (sequence.spec.options.priority, held[sequence.client], sequence.order)
        )

    def _take_out(self, victim: Sequence) -> None:
        """Preempt a running sequence, which may have tokens in the step. No other sequence starts in it."""
        self._tokens_left += self._counts.pop(victim, 0)
        self._reserved_pages = None
        self._admits = False
        self._has_preempted = True
        self._scheduler.preempt(victim)
