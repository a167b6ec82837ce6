"""FairScheduler: shares the steps between clients, where the requests name several (``RequestSpec.client``).

After Sheng et al., "Fairness in Serving Large Language Models" (arXiv:2401.00588): every client has a counter of the
tokens it was served, and the one with the least goes first. Differences to the paper's VTC:

- Not only waiting requests are chosen like this but every piece of a step: an answer's token, or some tokens of a
  prompt. So a long prompt that was begun does not hold up another client's.
- A client whose whole demand a step meets, or who waits for pages only, saves nothing up: its counter is lifted to the
  least of those that want more.
- While answers run, a step has no more tokens than let it take as long as one with a token for every client and
  ``STRETCH - 1`` times as long as one of a single token, as far as earlier steps tell. Without this, one client's
  prompts would slow another's answer however small their part of the tokens were, because a step takes as long as all
  of its tokens.
- A client of whom nothing runs may take the place of the last sequence of another of whom several run.

Among the sequences of one client the order is that of ``Scheduler``. A smaller ``priority`` goes first, whosever it is;
clients share what has the same one. With sequences of a single client everything is as in ``Scheduler``.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.engine.step_times import StepTimes

#: What a generated token counts; one of a prompt counts 1.
OUTPUT_WEIGHT = 2
#: Tokens of a prompt that a client gets in one turn.
QUANTUM = 16
#: How much longer steps may take while several clients share them, and the tokens of the first ones.
STRETCH = 3.0
FIRST_LIMIT = 64


@dataclass
class _Turn:
    """What a client wants from a step, each list in order; the first of ``answers`` comes first.

    charged  what it got so far, weighted.
    partial  prompts that are begun and not complete; ``long`` ones among them.
    is_blocked  whether slots or pages are short for what waits.
    """

    client: str
    answers: deque[Sequence] = field(default_factory=deque)
    prompts: deque[Sequence] = field(default_factory=deque)
    waiting: deque[Sequence] = field(default_factory=deque)
    num_running: int = 0
    charged: int = 0
    partial: int = 0
    long: int = 0
    is_blocked: bool = False

    @property
    def next(self) -> Sequence | None:
        for queue in (self.answers, self.prompts, self.waiting):
            if queue:
                return queue[0]
        return None


@dataclass
class _Step:
    """A step that is being filled: tokens by sequence, those that it starts, and room for more answers and tokens."""

    answers: int
    room: int
    counts: dict[Sequence, int] = field(default_factory=dict)
    started: set[Sequence] = field(default_factory=set)
    admits: bool = True


class FairScheduler(Scheduler):
    """``Scheduler``, fair between clients.

    counters  of what clients were served since several of them have sequences.
    """

    def __init__(self, pool: PagePool, config: SchedulerConfig) -> None:
        super().__init__(pool, config)
        self.counters: dict[str, int] = {}
        self._step_times = StepTimes()
        self._live: Counter[str] = Counter()
        self._least = 0  # the least counter of a client that wants more
        # Tokens of the steps whose time is not known yet: asynchronously, a step ends when the next one is submitted.
        self._steps: deque[int] = deque([0] * config.async_scheduling, maxlen=1 + config.async_scheduling)

    @property
    def num_clients(self) -> int:
        """Clients with waiting or running sequences."""
        return len(self._live)

    def add(self, sequence: Sequence) -> None:
        client = sequence.spec.client
        if client not in self._live:
            self.counters[client] = max(self.counters.get(client, 0), self._least)
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
        # If nothing runs any more, the time since the last step is not how long that step took.
        if self.running and self._steps and self._steps[0] and now > self._last_step:
            self._step_times.observe(self._steps[0], now - self._last_step)
        chunks = super().schedule(now)
        self._steps.append(sum(chunk.count for chunk in chunks))
        return chunks

    def _choose(self, waited: bool) -> list[ScheduledChunk]:
        if len(self._live) < 2:
            return super()._choose(waited)
        turns = self._turns(waited)
        answers, budget = self._step_limits()
        step = _Step(answers, min(budget, self._room(turns)))
        # Answers first, as far as they surely are within their client's part of the step.
        quota = step.room // (2 * len(turns))
        for turn in sorted(turns.values(), key=self._rank):
            for _ in range(min(quota, len(turn.answers))):
                self._serve(turn, step)
        heap = [(self._rank(turn), turn) for turn in turns.values() if turn.next]
        heapq.heapify(heap)
        while heap and step.room > 0:
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
        """What every client wants."""
        turns = {client: _Turn(client) for client in self._live}
        for sequence in self.running:
            turn, uncomputed = turns[sequence.spec.client], self._wanted(sequence)
            turn.num_running += 1
            if uncomputed > 1:
                turn.prompts.append(sequence)
                turn.partial += 1
                turn.long += self._is_long(uncomputed)
            elif uncomputed:
                turn.answers.append(sequence)
        if waited:
            for sequence in self.waiting:
                turns[sequence.spec.client].waiting.append(sequence)
        return turns

    def _room(self, turns: dict[str, _Turn]) -> int:
        """Tokens of this step."""
        if not self.config.enable_chunked_prefill or not any(turn.answers for turn in turns.values()):
            return self.budget
        most = self._step_times.most_tokens(len(turns), STRETCH)
        return min(self.budget, max(FIRST_LIMIT if most is None else most, 4 * len(turns)))

    def _rank(self, turn: _Turn) -> tuple[Any, ...]:
        """The least goes first; of equal ones that of whom less runs, then who came first."""
        first = turn.next
        priority, number = first.order if first else (0, 0)
        return priority, self.counters[turn.client] + turn.charged, turn.num_running, number, turn.client

    def _serve(self, turn: _Turn, step: _Step) -> None:
        """Give ``turn`` one piece of the step, or take off it what cannot get any."""
        if turn.answers:
            sequence = turn.answers.popleft()
            if step.answers > 0:
                step.answers -= 1
                self._extend(sequence, 1, turn, step)
        elif turn.waiting and (not turn.prompts or turn.partial < self.config.max_num_partial_prefills):
            self._begin(turn, step)
        else:
            sequence = turn.prompts.popleft()
            done = step.counts.get(sequence, 0)
            count = self._piece(sequence.num_uncomputed_tokens, done, step.room)
            if count and self._extend(sequence, count, turn, step):
                self._after(sequence, turn, step)

    def _piece(self, uncomputed: int, done: int, room: int) -> int:
        """Tokens of a prompt in one turn, ``done`` of its uncomputed ones being in this step already."""
        count = self._allowance(uncomputed - done, room, QUANTUM)
        most = self.config.long_prefill_token_threshold if self.config.enable_chunked_prefill else 0
        return min(count, max(0, most - done)) if most and self._is_long(uncomputed) else count

    def _after(self, sequence: Sequence, turn: _Turn, step: _Step) -> None:
        """Whether the prompt goes on in this step: in turn with others that are begun."""
        if step.counts[sequence] == sequence.num_uncomputed_tokens:
            turn.partial -= 1
        else:
            turn.prompts.append(sequence)

    def _extend(self, sequence: Sequence, count: int, turn: _Turn, step: _Step) -> bool:
        """Add ``count`` tokens of ``sequence`` to the step, preempting others if pages run out."""
        if sequence.slot is None:  # preempted in this step
            return False
        total = step.counts.get(sequence, 0) + count
        while not self._grow(sequence, total):
            victim = self._last(self.running[1:] or self.running)
            self._take_out(victim, step)
            step.admits = False
            if victim is sequence:
                return False
        step.room -= count
        step.counts[sequence] = total
        turn.charged += OUTPUT_WEIGHT if sequence.num_uncomputed_tokens == 1 else count
        return True

    def _last(self, candidates: list[Sequence]) -> Sequence:
        """Who gives up its pages: the last of the client that holds most. The first of all is no candidate, so that
        somebody gets to the end whatever the others do.
        """
        held: Counter[str] = Counter()
        for one in self.running:
            held[one.spec.client] += len(one.pages)
        return max(candidates, key=lambda one: (one.spec.priority, held[one.spec.client], one.order))

    def _take_out(self, victim: Sequence, step: _Step) -> None:
        step.room += step.counts.pop(victim, 0)
        self.running.remove(victim)
        self._preempt(victim)

    def _begin(self, turn: _Turn, step: _Step) -> None:
        """Start the next waiting sequence of ``turn``. If it does not fit, nobody starts before it."""
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
        count = self._piece(uncomputed, 0, step.room)
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
        step.room -= count
        step.counts[sequence] = count
        turn.charged += count
        self._after(sequence, turn, step)

    def _make_room(self, sequence: Sequence, shared: list[int], turn: _Turn, step: _Step) -> bool:
        """Whether ``sequence`` has a slot and pages for all of it. If nothing of its client runs, others make room."""
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
        """Whether there are a slot and pages for all of ``sequence``, beside what those that run still need."""
        if len(self.running) >= self.max_num_seqs:
            return False
        needed = self._pages_for(len(sequence.token_ids)) - len(shared) + self.pool.num_idle(shared)
        for one in self.running:
            needed += max(0, self._pages_for(one.num_computed_tokens + one.num_uncomputed_tokens) - len(one.pages))
        return needed <= self.pool.num_free

    def _others(self, sequence: Sequence, step: _Step) -> list[Sequence]:
        """Who may have to make room for ``sequence``: sequences of clients of whom several run, and none is new; not
        the first of all.
        """
        running = Counter(one.spec.client for one in self.running)
        for one in step.started:
            del running[one.spec.client]
        others = [one for one in self.running[1:] if running[one.spec.client] > 1]
        return [one for one in others if one.spec.priority >= sequence.spec.priority]

    def _may_take_over(self) -> bool:
        if len(self._live) < 2 or not self.waiting:
            return False
        running = Counter(sequence.spec.client for sequence in self.running)
        return any(sequence.spec.client not in running for sequence in self.waiting)

    def _settle(self, chosen: list[ScheduledChunk], blocked: set[str]) -> None:
        """Charge every client, and lift the counters of those that want no more, or only what does not fit yet."""
        left = {sequence.spec.client for sequence in self.waiting} - blocked
        served = {chunk.sequence: chunk.count for chunk in chosen}
        left |= {one.spec.client for one in self.running if self._wanted(one) > served.get(one, 0)}
        if not left:
            self._reset_counters()
            return
        for chunk in chosen:
            one = chunk.sequence
            self.counters[one.spec.client] += OUTPUT_WEIGHT if one.num_uncomputed_tokens == 1 else chunk.count
        self._least = min(self.counters[client] for client in left)
        for client, counter in list(self.counters.items()):
            if client in self._live:
                self.counters[client] = max(counter, self._least if client not in left else counter)
            elif counter <= self._least:
                del self.counters[client]

    def _reset_counters(self) -> None:
        self.counters = dict.fromkeys(self._live, 0)
        self._least = 0
