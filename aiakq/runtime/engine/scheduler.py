"""The scheduler: which sequences run in a step, and how many tokens of each.

There is no prefill or decode phase. Every sequence has tokens whose keys and values are missing: a whole prompt at
first, one token later. Each step hands out one budget of tokens, running sequences first, so that answers keep
flowing while long prompts are worked off in chunks. When pages run out, the running sequence that is last in order
gives its pages back and starts over later (preemption by recompute); it keeps its place in the queue and what it has
generated.

The order is that of arrival, or of the requests' priority and then of arrival.

A step may be chosen while the one before it still runs. What is launched counts as computed, and tokens that it brings
are counted though nobody knows them. Steps run one after the other, so pages may change hands at once.
"""

from __future__ import annotations

import bisect
import itertools
from operator import attrgetter

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.sequence import Scheduled, Sequence

_ORDER = attrgetter("order")


class Scheduler:
    """Waiting and running sequences over one page pool, each list in order."""

    def __init__(self, pool: PagePool, config: SchedulerConfig) -> None:
        self.pool = pool
        self.max_num_seqs = config.max_num_seqs
        self.budget = config.max_num_batched_tokens
        self.config = config
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._numbers = itertools.count()
        self._last_step = 0.0
        self._had_prompts = False
        self._prompt_seconds = 0.0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind the waiting ones of its priority."""
        sequence.order = (sequence.spec.priority, next(self._numbers))
        bisect.insort(self.waiting, sequence, key=_ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out and give its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []

    def may_preempt(self) -> bool:
        """Whether the next step could need more pages for what runs than are free."""
        needed = 0
        for sequence in self.running:
            end = sequence.num_computed + min(sequence.num_missing, self.budget)
            needed += max(0, self._pages_for(end) - len(sequence.pages))
        return needed > self.pool.num_free

    def schedule(self, now: float = 0.0) -> list[Scheduled]:
        """Choose the work of the step at ``now`` and give it pages. Sequences with one token come first (decodes).

        Where ``may_preempt``, no step may be on its way.
        """
        waited = self._waited(now)
        budget = self.budget
        # Running answers get their token whatever prompts stand before them.
        reserved = sum(sequence.num_missing == 1 for sequence in self.running)
        share = self._share(budget - reserved)
        chosen: list[Scheduled] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if sequence.num_missing == 1:
                reserved -= 1
                count = 1
            else:
                # Nothing is missing where the last token is on its way.
                count = self._allowance(sequence.num_missing, budget - reserved, share)
            while count and not self._grow(sequence, count):
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    count = 0
            if count:
                chosen.append(Scheduled.of(sequence, count))
                budget -= count
            index += 1
        if waited and not preempted:
            self._admit(chosen, budget, share)
        chosen.sort(key=lambda item: item.count > 1)
        self._had_prompts = bool(chosen) and chosen[-1].count > 1
        for item in chosen:
            item.sequence.num_computed = item.end
            item.sequence.num_coming += item.draws
            item.sequence.launched = item
        return chosen

    def _waited(self, now: float) -> bool:
        """Whether waiting prompts have gathered long enough; they have where nothing else runs."""
        # Where nothing runs any more, steps do not follow each other, and the time between them is no step's.
        if self._had_prompts and self.running:
            self._prompt_seconds = now - self._last_step
        self._last_step = now
        if not (self.config.scheduler_delay_factor and self.waiting and self.running):
            return True
        earliest = min(sequence.times.arrived for sequence in self.waiting)
        return now - earliest > self.config.scheduler_delay_factor * self._prompt_seconds

    def _share(self, room: int) -> int:
        """The most tokens of a prompt in this step: a part of ``room`` where several run together."""
        prompts = sum(sequence.num_missing > 1 for sequence in self.running) + len(self.waiting)
        return max(1, room // max(1, min(self.config.max_num_partial_prefills, prompts)))

    def _allowance(self, missing: int, room: int, share: int) -> int:
        """Tokens of a prompt that this step computes."""
        config = self.config
        if not config.enable_chunked_prefill:
            return missing if missing <= room else 0
        if config.long_prefill_token_threshold and self._is_long(missing):
            share = min(share, config.long_prefill_token_threshold)
        return max(0, min(missing, room, share))

    def _is_long(self, missing: int) -> bool:
        return 0 < self.config.long_prompt_tokens < missing

    def _admit(self, chosen: list[Scheduled], budget: int, share: int) -> None:
        """Start waiting sequences while budget, places and pages last."""
        config = self.config
        split = sum(not item.completes for item in chosen)
        long = sum(self._is_long(sequence.num_missing) for sequence in self.running)
        index = 0
        while index < len(self.waiting) and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[index]
            shared = self._shared_pages(sequence)
            cached = len(shared) * self.pool.page_size
            missing = len(sequence.token_ids) - cached
            is_long = self._is_long(missing)
            if is_long and long >= config.max_long_partial_prefills < config.max_num_partial_prefills:
                index += 1
                continue
            count = self._allowance(missing, budget, share)
            if count == 0 or (count < missing and split >= config.max_num_partial_prefills):
                return
            # The whole prompt must fit now: half a prompt that cannot go on only blocks others.
            needed = self._pages_for(len(sequence.token_ids)) - len(shared)
            if needed + self.pool.num_idle(shared) > self.pool.num_free:
                return
            del self.waiting[index]
            self.pool.hold(shared)
            sequence.pages = list(shared)
            sequence.num_computed = cached
            sequence.num_published = len(shared)
            if sequence.num_cached is None:
                sequence.num_cached = cached
                self.prefix_queries += sequence.num_prompt
                self.prefix_hits += cached
            bisect.insort(self.running, sequence, key=_ORDER)
            grown = self._grow(sequence, count)
            assert grown, "the pages were counted before"
            chosen.append(Scheduled.of(sequence, count))
            budget -= count
            split += count < missing
            long += is_long

    def _shared_pages(self, sequence: Sequence) -> list[int]:
        """Pages of an equal beginning. The last token is always computed anew: its logits are needed."""
        if not self.pool.caching or sequence.wants_prompt_logprobs:
            return []
        full = (len(sequence.token_ids) - 1) // self.pool.page_size
        return self.pool.match(sequence.page_hashes(self.pool.page_size, full))

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Give ``sequence`` the pages for ``count`` more tokens; False if there are not enough."""
        needed = self._pages_for(sequence.num_computed + count) - len(sequence.pages)
        if needed > 0:
            pages = self.pool.allocate(needed)
            if pages is None:
                return False
            sequence.pages += pages
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.release(sequence.reset())
        bisect.insort(self.waiting, sequence, key=_ORDER)
        self.num_preemptions += 1

    def computed(self, item: Scheduled) -> None:
        """Record that a step ran and its result is sound: pages that ``item`` filled become findable."""
        sequence = item.sequence
        if not self.pool.caching or sequence.wants_prompt_logprobs:
            return
        full = item.end // self.pool.page_size
        if full > sequence.num_published:
            hashes = sequence.page_hashes(self.pool.page_size, full)
            for index in range(sequence.num_published, full):
                self.pool.publish(sequence.pages[index], hashes[index])
            sequence.num_published = full

    def forget_prefixes(self) -> None:
        """Let no later sequence find a page that was filled before, or is being filled."""
        self.pool.forget_all()
        for sequence in self.running:
            sequence.num_published = max(sequence.num_published, sequence.num_computed // self.pool.page_size)

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        live = [*self.running, *self.waiting]
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_ORDER), "a queue is out of order"
        assert len({id(sequence) for sequence in live}) == len(live), "a sequence is queued twice"
        self.pool.check([sequence.pages for sequence in live])
        for sequence in live:
            assert len(sequence.pages) >= self._pages_for(sequence.num_computed)
            assert sequence.num_computed <= len(sequence.token_ids) + sequence.num_coming
            assert 0 <= sequence.num_coming <= 1
