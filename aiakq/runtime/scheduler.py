"""The scheduler: which sequences run in a step, and how many tokens of each.

There is no prefill or decode phase. Every sequence has tokens whose keys and values are missing: a whole prompt at
first, one token later. Each step hands out one budget of tokens, running sequences first, so that answers keep
flowing while long prompts are worked off in chunks. When pages run out, the youngest running sequence gives its pages
back and starts over later (preemption by recompute); it keeps its place at the head of the queue and what it has
generated.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from aiakq.runtime.pages import PagePool
from aiakq.runtime.sequence import Sequence


@dataclass(frozen=True, eq=False)
class Scheduled:
    """``count`` tokens of ``sequence`` to run in this step, from its num_computed on."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether the step reaches the sequence's last token, so that the next one can be sampled."""
        return self.count == self.sequence.num_missing


class Scheduler:
    """Waiting and running sequences over one page pool."""

    def __init__(self, pool: PagePool, max_num_seqs: int, max_num_batched_tokens: int, chunked_prefill: bool) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.budget = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind the waiting ones."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out and give its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []

    def schedule(self) -> list[Scheduled]:
        """Choose this step's work and give it pages. Sequences with one token come first (decodes)."""
        budget = self.budget
        chosen: list[Scheduled] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            count = self._allowance(sequence, budget)
            while count and not self._grow(sequence, count):
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    count = 0
            if count:
                chosen.append(Scheduled(sequence, count))
                budget -= count
            index += 1
        if not preempted:
            self._admit(chosen, budget)
        chosen.sort(key=lambda item: item.count > 1)
        return chosen

    def _allowance(self, sequence: Sequence, budget: int) -> int:
        missing = sequence.num_missing
        if missing > budget and not self.chunked_prefill:
            return 0
        return min(missing, budget)

    def _admit(self, chosen: list[Scheduled], budget: int) -> None:
        """Start waiting sequences while budget, places and pages last."""
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            shared = self._shared_pages(sequence)
            cached = len(shared) * self.pool.page_size
            missing = len(sequence.token_ids) - cached
            if missing > budget and not self.chunked_prefill:
                return
            # The whole prompt must fit now: half a prompt that cannot go on only blocks others.
            needed = self._pages_for(len(sequence.token_ids)) - len(shared)
            if needed + self.pool.num_idle(shared) > self.pool.num_free:
                return
            self.waiting.popleft()
            self.pool.hold(shared)
            sequence.pages = list(shared)
            sequence.num_computed = cached
            sequence.num_published = len(shared)
            if sequence.num_cached is None:
                sequence.num_cached = cached
                self.prefix_queries += sequence.num_prompt
                self.prefix_hits += cached
            self.running.append(sequence)
            count = min(missing, budget)
            grown = self._grow(sequence, count)
            assert grown, "the pages were counted before"
            chosen.append(Scheduled(sequence, count))
            budget -= count

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
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def computed(self, item: Scheduled) -> None:
        """Record that a step ran: keys and values of ``item`` are in its pages now; full pages become findable."""
        sequence = item.sequence
        sequence.num_computed += item.count
        if not self.pool.caching or sequence.wants_prompt_logprobs:
            return
        full = sequence.num_computed // self.pool.page_size
        if full > sequence.num_published:
            hashes = sequence.page_hashes(self.pool.page_size, full)
            for index in range(sequence.num_published, full):
                self.pool.publish(sequence.pages[index], hashes[index])
            sequence.num_published = full

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        live = [*self.running, *self.waiting]
        assert len({id(sequence) for sequence in live}) == len(live), "a sequence is queued twice"
        self.pool.check([sequence.pages for sequence in live])
        for sequence in live:
            assert len(sequence.pages) >= self._pages_for(sequence.num_computed)
            assert sequence.num_computed <= len(sequence.token_ids)
