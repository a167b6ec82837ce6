"""Scheduler: chooses the sequences of a step and the number of tokens of each.

There is no prefill or decode phase. Every sequence has tokens whose keys and values are not computed yet: a whole
prompt at first, one token later. Each step has one budget of tokens, given to decodes first, so that they get their
next token while long prompts are computed in chunks. When pages run out, the running sequence that is last in order
gives its pages back and starts over later (preemption by recompute); it keeps its order in the queue and its generated
tokens.

The order is that of arrival, or of the requests' priority and then of arrival. Clients (``RequestSpec.client``) share
steps fairly at equal priority: ``StepBuilder`` serves them in turns.

A step may be scheduled while earlier ones are pending. Their tokens count as computed, and the tokens they will sample
are counted although their values are not known. Steps run one after the other, so the pages of a sequence that ended
can be reused at once.

Where a model is distributed over the stages of a pipeline, as many steps are pending as there are stages. A sequence
whose next token is pending is then left out, and each step takes its part of what there is to do, so that all stages
have something to compute.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import TypeVar

from aiakq.runtime.config.scheduler import SchedulerConfig
from aiakq.runtime.engine.client_shares import ClientShares
from aiakq.runtime.engine.pages import PagePool
from aiakq.runtime.engine.resources import Resource, StepExtension
from aiakq.runtime.engine.sequence import ScheduledChunk, ScheduledStep, Sequence, SteadySequences
from aiakq.runtime.engine.step_builder import StepBuilder
from aiakq.runtime.engine.step_times import StepTimes

R = TypeVar("R", bound=Resource)
#: Number of steady sequences in a step from which on columns are faster than objects.
MIN_COLUMNS = 16
_ORDER = attrgetter("order")
#: Tokens of prompts that a step computes at least, although the stages could share them more evenly: fewer do not take
#: much less time.
_MIN_PIPELINED_TOKENS = 64


class Scheduler:
    """Waiting and running sequences over one page pool, each list in order.

    clients      how many tokens each client was served.
    resources    what sequences need besides slots and pages.
    extensions   those of ``resources`` that have a part in steps.
    budget       tokens in a step.
    min_columns  number of steady sequences in a step from which on they get columns.
    steady       sequences that were scheduled in columns in the last step; None if none were.
    step_times   how long steps take by their number of tokens.
    freed_slots  of sequences that stopped running, for the next batch to the executor; its reader empties it.
    """

    def __init__(self, pool: PagePool, config: SchedulerConfig, resources: Iterable[Resource] = ()) -> None:
        self.pool = pool
        self.config = config
        self.max_num_seqs = config.max_num_seqs
        self.budget = config.max_num_batched_tokens
        self.min_columns = MIN_COLUMNS
        self.clients = ClientShares()
        self.resources = tuple(resources)
        self.extensions = [each for each in self.resources if isinstance(each, StepExtension)]
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.freed_slots: list[int] = []
        self._free_slots = list(reversed(range(self.max_num_seqs)))
        self._numbers = itertools.count()
        self.steady: SteadySequences | None = None
        self._had_prompts = False
        self._last_step = 0.0
        self._prompt_seconds = 0.0
        self.step_times = StepTimes()
        # Tokens of the steps whose time is not known yet: with async scheduling a step ends when the next is submitted.
        self._steps: deque[int] = deque([0] * config.async_scheduling, maxlen=1 + config.async_scheduling)

    def resource(self, kind: type[R]) -> R | None:
        """Return the resource of class ``kind``; None if there is none."""
        return next((each for each in self.resources if isinstance(each, kind)), None)

    # --- sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind the waiting ones of its priority."""
        sequence.order = (sequence.spec.options.priority, next(self._numbers))
        self.clients.add(sequence.client)
        for resource in self.resources:
            resource.add(sequence)
        bisect.insort(self.waiting, sequence, key=_ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or aborted sequence out; its pages and its slot are free again."""
        if sequence.slot is not None:
            self.running.remove(sequence)
            self._free_slot(sequence)
            self.steady = self.steady if self.running else None  # which keeps its sequences in memory
        else:
            self.waiting.remove(sequence)
        for resource in self.resources:
            resource.remove(sequence)
        self.pool.decref(sequence.pages)
        sequence.pages = []
        self.clients.remove(sequence.client)

    # --- steps

    def awaits_results(self) -> bool:
        """Whether the next step needs the results of pending ones."""
        return any(extension.awaits_results(self.running) for extension in self.extensions)

    def may_preempt(self) -> bool:
        """Whether the next step may preempt a sequence: pages may run out, or another client wants to start."""
        if self._may_lack_pages():
            return True
        if len(self.clients) < 2 or not self.waiting:
            return False
        running = {sequence.client for sequence in self.running}
        return any(sequence.client not in running for sequence in self.waiting)

    def _may_lack_pages(self) -> bool:
        """Whether the running sequences may need more pages in the next step than are free."""
        if len(self.running) + self.budget // self.pool.page_size < self.pool.num_free:
            return False  # the tokens of a step fill that many, with one begun per sequence
        needed, size = 0, self.pool.page_size
        for sequence in self.running:
            if sequence.is_steady:  # most, in fewer operations than those below
                computed = sequence.num_computed_tokens
                needed += len(sequence.pages) * size <= computed < sequence.num_needed_tokens
                continue
            end = sequence.num_computed_tokens + min(sequence.num_uncomputed_tokens, self.budget)
            needed += max(0, self.pool.pages_for(end) - len(sequence.pages))
        return needed > self.pool.num_free

    def schedule(self, now: float = 0.0) -> ScheduledStep:
        """Choose the chunks of the step at ``now``, in seconds, and allocate their pages. Those of one token come first
        (decodes). The times of steps are measured, too.

        If ``may_preempt``, no step may be pending.
        """
        # If nothing is running, the time since the last step includes idle time.
        if self.running and self._steps and self._steps[0] and now > self._last_step:
            self.step_times.observe(self._steps[0], now - self._last_step)
        builder = StepBuilder(self, *self._step_limits(), waited=self._waited(now))
        # Draft tokens are planned for single sequences.
        chosen = builder.step(has_columns=not self.extensions)
        self.steady = None if chosen.decodes is None else chosen.decodes.steady
        for resource in self.resources:
            resource.end_step(self._waiting_in_turn())
        self._had_prompts = any(chunk.count > 1 for chunk in chosen)
        for extension in self.extensions:
            extension.extend(chosen, self.running, self._had_prompts)
        if len(chosen) > 1:
            chosen.sort(key=lambda chunk: chunk.count > 1)
        for chunk in chosen:
            sequence = chunk.sequence
            sequence.num_computed_tokens = chunk.end
            sequence.pending_chunks.append(chunk)
        self._steps.append(chosen.num_tokens)
        return chosen

    @property
    def num_deferred(self) -> int:
        """Waiting sequences that a resource does not admit yet, such as those whose adapter is not in memory."""
        return sum(not self.admits(sequence) for sequence in self.waiting) if self.resources else 0

    def _waiting_in_turn(self) -> Iterator[Sequence]:
        """Waiting sequences, those of the clients that were served least first. Sorted when the first is asked for."""
        counters = self.clients.counters
        yield from sorted(self.waiting, key=lambda one: (one.order[0], counters[one.client], one.order[1]))

    def num_wanted(self, sequence: Sequence) -> int:
        """Tokens of a running sequence that could be computed in this step."""
        if self.config.num_stages > 1 and sequence.num_pending_tokens:
            return 0
        return sequence.num_uncomputed_tokens

    def admits(self, sequence: Sequence) -> bool:
        """Whether every resource lets a waiting sequence start; slots and pages aside."""
        for resource in self.resources:
            if not resource.admits(sequence):
                return False
        return True

    def _step_limits(self) -> tuple[int, int]:
        """The maximum number of decodes and of tokens in a step. With pipeline stages, a share that leaves as much work
        for the other stages.
        """
        stages = self.config.num_stages
        if stages == 1:
            return self.max_num_seqs, self.budget
        prompts = sum(len(sequence.token_ids) for sequence in self.waiting)
        decodes = 0
        for sequence in self.running:
            is_decode = sequence.num_pending_tokens > 0 or sequence.num_uncomputed_tokens == 1
            decodes += is_decode
            prompts += 0 if is_decode else sequence.num_uncomputed_tokens
        decodes = -(-decodes // stages)
        if not self.config.enable_chunked_prefill:
            return decodes, self.budget
        return decodes, min(self.budget, decodes + max(_MIN_PIPELINED_TOKENS, -(-prompts // stages)))

    def _waited(self, now: float) -> bool:
        """Whether waiting prompts were delayed long enough, or nothing else runs."""
        # If nothing runs any more, the time since the last step is not how long that step took.
        if self._had_prompts and self.running:
            self._prompt_seconds = now - self._last_step
        self._last_step = now
        if not (self.config.scheduler_delay_factor and self.waiting and self.running):
            return True
        earliest = min(sequence.times.arrived for sequence in self.waiting)
        return now - earliest > self.config.scheduler_delay_factor * self._prompt_seconds

    def start(self, sequence: Sequence, shared: list[int], count: int) -> None:
        """Let a waiting sequence run: give it a slot, the cached pages ``shared``, and those for ``count`` tokens."""
        cached = len(shared) * self.pool.page_size
        self.waiting.remove(sequence)
        for resource in self.resources:
            resource.acquire(sequence)
        self.pool.incref(shared)
        sequence.pages = list(shared)
        sequence.slot = self._free_slots.pop()
        sequence.num_computed_tokens = cached
        sequence.num_inserted_pages = len(shared)
        if sequence.num_cached is None:
            sequence.num_cached = cached
            self.prefix_queries += sequence.num_prompt
            self.prefix_hits += cached
        bisect.insort(self.running, sequence, key=_ORDER)
        grown = self.pool.extend(sequence.pages, cached + count)
        assert grown, "the pages were counted before"

    def shared_pages(self, sequence: Sequence) -> list[int]:
        """Cached pages of an equal beginning. The last token is always computed, because its logits are needed."""
        if not self.pool.caching or sequence.reads_whole_prompt:
            return []
        full = (len(sequence.token_ids) - 1) // self.pool.page_size
        return self.pool.match(sequence.page_hashes(self.pool.page_size, full))

    def preempt(self, sequence: Sequence) -> None:
        """Stop a running sequence, which starts over later."""
        self.running.remove(sequence)
        self.pool.decref(sequence.reset())
        self._free_slot(sequence)
        bisect.insort(self.waiting, sequence, key=_ORDER)
        self.num_preemptions += 1

    def _free_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        for resource in self.resources:
            resource.release(sequence)
        self._free_slots.append(sequence.slot)
        if sequence.num_submitted_pages is not None:
            self.freed_slots.append(sequence.slot)
        sequence.slot = sequence.num_submitted_pages = None

    # --- the prefix cache

    def insert_pages(self, chunk: ScheduledChunk) -> None:
        """Put the pages that ``chunk`` filled into the prefix cache; its step has run and the result is valid."""
        sequence = chunk.sequence
        if not self.pool.caching or sequence.reads_whole_prompt:
            return
        full = chunk.end // self.pool.page_size
        if full > sequence.num_inserted_pages:
            hashes = sequence.page_hashes(self.pool.page_size, full)
            for index in range(sequence.num_inserted_pages, full):
                self.pool.insert(sequence.pages[index], hashes[index])
            sequence.num_inserted_pages = full

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; pages that pending steps fill stay out of it too."""
        self.pool.evict_all()
        for sequence in self.running:
            sequence.num_inserted_pages = max(
                sequence.num_inserted_pages, sequence.num_computed_tokens // self.pool.page_size
            )

    def check(self) -> None:
        """Assert the invariants that hold between steps."""
        live = [*self.running, *self.waiting]
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_ORDER), "a queue is out of order"
        assert len({id(sequence) for sequence in live}) == len(live), "a sequence is queued twice"
        self.pool.check([sequence.pages for sequence in live])
        used = [sequence.slot for sequence in self.running if sequence.slot is not None]
        for resource in self.resources:
            resource.check()
        assert sorted([*used, *self._free_slots]) == list(range(self.max_num_seqs)), "a slot is lost"
        assert not any(sequence.slot is not None for sequence in self.waiting), "a waiting sequence has a slot"
        for sequence in live:
            assert len(sequence.pages) >= self.pool.pages_for(sequence.num_computed_tokens)
            assert sequence.num_computed_tokens <= len(sequence.token_ids) + sequence.num_pending_tokens
            assert sequence.num_pending_tokens == sum(chunk.samples for chunk in sequence.pending_chunks)
