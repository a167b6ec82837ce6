"""FairScheduler: shares steps fairly between clients, if requests name several (``RequestSpec.client``).

After Sheng et al., "Fairness in Serving Large Language Models" (arXiv:2401.00588): every client has a counter of the
tokens it was served, and the client with the lowest counter is served first. Differences from the paper's VTC:

- Clients compete not only for the admission of waiting requests, but for every piece of a step: one decode token, or a
  few prompt tokens. A long prompt in progress therefore does not hold up another client's request.
- A client whose whole demand is met by a step, or which only waits for pages, does not accumulate credit: its counter
  is raised to the lowest counter of the clients that want more.
- While sequences decode, a step's number of tokens is limited such that its estimated time does not exceed that of a
  step with one token per client plus ``STRETCH - 1`` times that of a single token. Otherwise the prompts of one client
  would slow down the decoding of others, however small their share of tokens, because a step lasts as long as all of
  its tokens take.
- A client without running sequences may preempt the last sequence of a client with several running sequences.

The sequences of one client are ordered as in ``Scheduler``. A smaller ``priority`` is served first, regardless of the
client; clients share steps at equal priority. With a single client this behaves exactly as ``Scheduler``.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.adapters import AdapterRef
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.engine.step_times import StepTimes

#: Weight of a generated token in a client's counter; a prompt token has weight 1.
OUTPUT_WEIGHT = 2
#: Maximum number of prompt tokens that a client gets per turn.
QUANTUM = 16
#: Factor by which steps may be slower while clients share them, and the token limit until step times are known.
STRETCH = 3.0
FIRST_LIMIT = 64


@dataclass
class _Turn:
    """The demand of a client in a step, in order: ``decodes`` are served first, then prompts, then waiting sequences.

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
        for queue in (self.decodes, self.prompts, self.waiting):
            if queue:
                return queue[0]
        return None


@dataclass
class _Step:
    """A step that is being filled.

    decodes      number of decode tokens that may be added.
    tokens_left  number of tokens that may be added.
    counts       number of tokens by sequence.
    started      sequences that start in this step.
    admits       whether waiting sequences may still start in this step.
    """

    decodes: int
    tokens_left: int
    counts: dict[Sequence, int] = field(default_factory=dict)
    started: set[Sequence] = field(default_factory=set)
    admits: bool = True


class FairScheduler(Scheduler):
    """A ``Scheduler`` that is fair between clients.

    counters  weighted tokens served to each client, since several clients have had sequences.
    """

    def __init__(self, pool: PagePool, config: SchedulerConfig) -> None:
        super().__init__(pool, config)
        self.counters: dict[str, int] = {}
        self._step_times = StepTimes()
        self._live: Counter[str] = Counter()
        self._min_counter = 0  # lowest counter of the clients that want more
        # Tokens of the steps whose time is not known yet: with async scheduling a step ends when the next is submitted.
        self._steps: deque[int] = deque([0] * config.async_scheduling, maxlen=1 + config.async_scheduling)

    @property
    def num_clients(self) -> int:
        """Number of clients with waiting or running sequences."""
        return len(self._live)

    def add(self, sequence: Sequence) -> None:
        client = sequence.spec.client
        if client not in self._live:
            self.counters[client] = max(self.counters.get(client, 0), self._min_counter)
        self._live[client] += 1
        super().add(sequence)

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        client = sequence.spec.client
        self._live[client] -= 1
        if not self._live[client]:
            del self._live[client]
            if len(self._live) < 2:
                self._reset_counters()

    def may_preempt(self) -> bool:
        return super().may_preempt() or self._may_take_over()

    def schedule(self, now: float = 0.0) -> list[ScheduledChunk]:
        """Schedule the next step; ``now`` is the time in seconds. Also measures how long steps take."""
        # If nothing is running, the time since the last step includes idle time.
        if self.running and self._steps and self._steps[0] and now > self._last_step:
            self._step_times.observe(self._steps[0], now - self._last_step)
        chunks = super().schedule(now)
        self._steps.append(sum(chunk.count for chunk in chunks))
        return chunks

    def _waiting_adapters(self) -> Iterator[AdapterRef | None]:
        if len(self._live) < 2:
            yield from super()._waiting_adapters()
            return
        turns = sorted(self.waiting, key=lambda one: (one.order[0], self.counters[one.spec.client], one.order[1]))
        yield from (sequence.spec.adapter for sequence in turns)

    def _choose(self, waited: bool) -> list[ScheduledChunk]:
        if len(self._live) < 2:
            return super()._choose(waited)
        turns = self._turns(waited)
        decodes, budget = self._step_limits()
        step = _Step(decodes, min(budget, self._max_step_tokens(turns)))
        # Decodes first, up to a number that is certainly within each client's share of the step.
        quota = step.tokens_left // (2 * len(turns))
        for turn in sorted(turns.values(), key=self._rank):
            for _ in range(min(quota, len(turn.decodes))):
                self._serve(turn, step)
        heap = [(self._rank(turn), turn) for turn in turns.values() if turn.next]
        heapq.heapify(heap)
        while heap and step.tokens_left > 0:
            turn = heap[0][1]
            self._serve(turn, step)
            if turn.next:
                heapq.heapreplace(heap, (self._rank(turn), turn))
            else:
                heapq.heappop(heap)
        chosen = [ScheduledChunk.of(sequence, count) for sequence, count in step.counts.items()]
        self._settle(chosen, {turn.client for turn in turns.values() if turn.is_blocked})
        return chosen

    def _turns(self, waited: bool) -> dict[str, _Turn]:
        """Return the demand of every client."""
        turns = {client: _Turn(client) for client in self._live}
        for sequence in self.running:
            turn, uncomputed = turns[sequence.spec.client], self._wanted(sequence)
            turn.num_running += 1
            if uncomputed > 1:
                turn.prompts.append(sequence)
                turn.partial += 1
                turn.long += self._is_long(uncomputed)
            elif uncomputed:
                turn.decodes.append(sequence)
        if waited:
            for sequence in self.waiting:
                turns[sequence.spec.client].waiting.append(sequence)
        return turns

    def _max_step_tokens(self, turns: dict[str, _Turn]) -> int:
        """Return the maximum number of tokens of this step."""
        if not self.config.enable_chunked_prefill or not any(turn.decodes for turn in turns.values()):
            return self.budget
        limit = self._step_times.max_tokens(len(turns), STRETCH)
        return min(self.budget, max(FIRST_LIMIT if limit is None else limit, 4 * len(turns)))

    def _rank(self, turn: _Turn) -> tuple[Any, ...]:
        """Return the sort key of a client; the smallest is served first.

        Ties are broken by the number of running sequences, then by order of arrival.
        """
        first = turn.next
        priority, number = first.order if first else (0, 0)
        return priority, self.counters[turn.client] + turn.charged, turn.num_running, number, turn.client

    def _serve(self, turn: _Turn, step: _Step) -> None:
        """Add one piece of the client's demand to the step, or drop demand that cannot be served in it."""
        if turn.decodes:
            sequence = turn.decodes.popleft()
            if step.decodes > 0:
                step.decodes -= 1
                self._extend(sequence, 1, turn, step)
        elif turn.waiting and (not turn.prompts or turn.partial < self.config.max_num_partial_prefills):
            self._begin(turn, step)
        else:
            sequence = turn.prompts.popleft()
            done = step.counts.get(sequence, 0)
            count = self._piece(sequence.num_uncomputed_tokens, done, step.tokens_left)
            if count and self._extend(sequence, count, turn, step):
                self._after(sequence, turn, step)

    def _piece(self, uncomputed: int, done: int, tokens_left: int) -> int:
        """Return the number of prompt tokens for one turn; ``done`` of the uncomputed ones are already in this step."""
        count = self._allowance(uncomputed - done, tokens_left, QUANTUM)
        limit = self.config.long_prefill_token_threshold if self.config.enable_chunked_prefill else 0
        return min(count, max(0, limit - done)) if limit and self._is_long(uncomputed) else count

    def _after(self, sequence: Sequence, turn: _Turn, step: _Step) -> None:
        """Requeue an incomplete prompt, so that it alternates with the client's other prompts in this step."""
        if step.counts[sequence] == sequence.num_uncomputed_tokens:
            turn.partial -= 1
        else:
            turn.prompts.append(sequence)

    def _extend(self, sequence: Sequence, count: int, turn: _Turn, step: _Step) -> bool:
        """Add ``count`` tokens of ``sequence`` to the step, preempting other sequences if pages run out.

        Returns False if ``sequence`` was preempted itself.
        """
        if sequence.slot is None:  # preempted in this step
            return False
        total = step.counts.get(sequence, 0) + count
        while not self._grow(sequence, total):
            victim = self._last(self.running[1:] or self.running)
            self._take_out(victim, step)
            step.admits = False
            if victim is sequence:
                return False
        step.tokens_left -= count
        step.counts[sequence] = total
        turn.charged += OUTPUT_WEIGHT if sequence.num_uncomputed_tokens == 1 else count
        return True

    def _last(self, candidates: list[Sequence]) -> Sequence:
        """Return the sequence to preempt: the last one of the client that holds the most pages.

        Callers exclude the first running sequence, which guarantees progress.
        """
        held: Counter[str] = Counter()
        for sequence in self.running:
            held[sequence.spec.client] += len(sequence.pages)
        return max(
            candidates, key=lambda sequence: (sequence.spec.priority, held[sequence.spec.client], sequence.order)
        )

    def _take_out(self, victim: Sequence, step: _Step) -> None:
        step.tokens_left += step.counts.pop(victim, 0)
        self.running.remove(victim)
        self._preempt(victim)

    def _begin(self, turn: _Turn, step: _Step) -> None:
        """Start the next waiting sequence of the client. If it does not fit, no other sequence starts in this step."""
        sequence = turn.waiting.popleft()
        if self.adapters is not None and not self.adapters.admits(sequence.spec.adapter):
            return
        config = self.config
        shared = self._shared_pages(sequence)
        uncomputed = len(sequence.token_ids) - len(shared) * self.pool.page_size
        is_long = self._is_long(uncomputed)
        if turn.partial >= config.max_num_partial_prefills:
            turn.waiting.clear()
            return
        if is_long and turn.long >= config.max_long_partial_prefills < config.max_num_partial_prefills:
            return
        count = self._piece(uncomputed, 0, step.tokens_left)
        if not step.admits or not count or not self._make_room(sequence, shared, turn, step):
            turn.is_blocked = count > 0
            step.admits = False
            turn.waiting.clear()
            return
        self._start(sequence, shared, count)
        step.started.add(sequence)
        turn.num_running += 1
        turn.long += is_long
        turn.partial += 1
        step.tokens_left -= count
        step.counts[sequence] = count
        turn.charged += count
        self._after(sequence, turn, step)

    def _make_room(self, sequence: Sequence, shared: list[int], turn: _Turn, step: _Step) -> bool:
        """Return whether there are a slot and pages for all of ``sequence``.

        If its client has no running sequence, sequences of other clients are preempted to make room.
        """
        if self._fits(sequence, shared):
            return True
        if turn.num_running:
            return False
        victims = self._others(sequence, step)
        if sum(len(victim.pages) for victim in victims) + self.pool.num_free < self._pages_for(len(sequence.token_ids)):
            return False
        while victims and not self._fits(sequence, shared):
            self._take_out(self._last(victims), step)
            step.admits = False
            victims = self._others(sequence, step)
        return self._fits(sequence, shared)

    def _fits(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether there are a slot and pages for all of ``sequence``, besides what running sequences still need."""
        if len(self.running) >= self.max_num_seqs:
            return False
        needed = self._pages_for(len(sequence.token_ids)) - len(shared) + self.pool.num_idle(shared)
        for other in self.running:
            total = other.num_computed_tokens + other.num_uncomputed_tokens
            needed += max(0, self._pages_for(total) - len(other.pages))
        return needed <= self.pool.num_free

    def _others(self, sequence: Sequence, step: _Step) -> list[Sequence]:
        """Return the sequences that may be preempted for ``sequence``.

        They belong to clients with several running sequences of which none started in this step. The first running
        sequence is never among them.
        """
        running = Counter(other.spec.client for other in self.running)
        for started in step.started:
            del running[started.spec.client]
        others = [other for other in self.running[1:] if running[other.spec.client] > 1]
        return [other for other in others if other.spec.priority >= sequence.spec.priority]

    def _may_take_over(self) -> bool:
        if len(self._live) < 2 or not self.waiting:
            return False
        running = Counter(sequence.spec.client for sequence in self.running)
        return any(sequence.spec.client not in running for sequence in self.waiting)

    def _settle(self, chosen: list[ScheduledChunk], blocked: set[str]) -> None:
        """Charge every client for the step, and raise the counters of clients with no further demand to serve."""
        unserved = {sequence.spec.client for sequence in self.waiting} - blocked
        served = {chunk.sequence: chunk.count for chunk in chosen}
        unserved |= {
            sequence.spec.client for sequence in self.running if self._wanted(sequence) > served.get(sequence, 0)
        }
        if not unserved:
            self._reset_counters()
            return
        for chunk in chosen:
            sequence = chunk.sequence
            self.counters[sequence.spec.client] += OUTPUT_WEIGHT if sequence.num_uncomputed_tokens == 1 else chunk.count
        self._min_counter = min(self.counters[client] for client in unserved)
        for client, counter in list(self.counters.items()):
            if client in self._live:
                self.counters[client] = max(counter, self._min_counter if client not in unserved else counter)
            elif counter <= self._min_counter:
                del self.counters[client]

    def _reset_counters(self) -> None:
        self.counters = dict.fromkeys(self._live, 0)
        self._min_counter = 0
