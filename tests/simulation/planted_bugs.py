"""Bugs to plant in the scheduler, the page pool and the engine: the simulator must find each of them.

A bug is a function that patches the real classes through ``patch(owner, name, value)``, which is undone later.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import msgspec

from aiakq.errors import error
from aiakq.runtime.engine import engine as engine_module
from aiakq.runtime.engine import sequence as sequence_module
from aiakq.runtime.engine.client_shares import ClientShares
from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.pages import ROOT, PagePool, page_hash
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.engine.step_builder import StepBuilder

Patch = Callable[[object, str, Any], None]


def decref_without_counting(patch: Patch) -> None:
    """A finished sequence frees pages that other sequences still read."""

    def decref(self: PagePool, pages: list[int]) -> None:
        for page in reversed(pages):
            self._refcounts[page] = 0
            self._free[page] = None

    patch(PagePool, "decref", decref)


def page_inserted_before_it_is_full(patch: Patch) -> None:
    """The prefix cache has a page whose last positions have not been written."""

    def insert_pages(self: Scheduler, chunk: Any) -> None:
        sequence = chunk.sequence
        real(self, chunk)
        full = min(
            -(-sequence.num_computed_tokens // self.pool.page_size), len(sequence.token_ids) // self.pool.page_size
        )
        if self.pool.caching and full > sequence.num_inserted_pages:
            self.pool.insert(sequence.pages[full - 1], sequence.page_hashes(self.pool.page_size, full)[full - 1])

    real = Scheduler.insert_pages
    patch(Scheduler, "insert_pages", insert_pages)


def decode_scheduled_before_its_token_is_sampled(patch: Patch) -> None:
    """The first stage computes a token that the last stage has not sampled yet."""
    patch(Scheduler, "num_wanted", lambda self, sequence: sequence.num_uncomputed_tokens)


def whole_prompt_taken_from_the_cache(patch: Patch) -> None:
    """A fully cached prompt leaves nothing to compute, so there are no logits."""

    def shared_pages(self: Scheduler, sequence: Sequence) -> list[int]:
        if not self.pool.caching or sequence.reads_whole_prompt:
            return []
        full = len(sequence.token_ids) // self.pool.page_size
        return self.pool.match(sequence.page_hashes(self.pool.page_size, full))

    patch(Scheduler, "shared_pages", shared_pages)


def page_hash_without_the_prefix(patch: Patch) -> None:
    """Pages with equal tokens after different prefixes have equal hashes."""

    def page_hashes(self: Sequence, page_size: int, count: int) -> list[bytes]:
        tokens = self.token_ids
        return [page_hash(ROOT, tokens[at * page_size : (at + 1) * page_size]) for at in range(count)]

    patch(Sequence, "page_hashes", page_hashes)


def page_hash_without_the_salt(patch: Patch) -> None:
    """One tenant is given cached pages of another."""
    patch(sequence_module, "root_hash", lambda salt: ROOT)


def reset_evicts_nothing(patch: Patch) -> None:
    """Pages from before a reset of the prefix cache are found after it."""
    patch(PagePool, "evict_all", lambda self: None)


def allocated_page_keeps_its_hash(patch: Patch) -> None:
    """The prefix cache has a page under its old hash after it was allocated again."""

    def allocate(self: PagePool, count: int) -> list[int] | None:
        kept = self._hashes[:], dict(self._by_hash)
        pages = real(self, count)
        self._hashes, self._by_hash = kept
        return pages

    real = PagePool.allocate
    patch(PagePool, "allocate", allocate)


def referenced_page_stays_free(patch: Patch) -> None:
    """A cached page is shared, but remains in the free list and is allocated to another sequence too."""

    def incref(self: PagePool, pages: list[int]) -> None:
        for page in pages:
            self._refcounts[page] += 1

    patch(PagePool, "incref", incref)


def preempted_sequence_keeps_its_progress(patch: Patch) -> None:
    """Its pages are freed, but their tokens still count as computed."""

    def reset(self: Sequence) -> list[int]:
        computed = self.num_computed_tokens
        pages = real(self)
        self.num_computed_tokens = computed
        return pages

    def start(self: Scheduler, sequence: Sequence, *args: Any) -> None:
        computed = sequence.num_computed_tokens
        real_start(self, sequence, *args)
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, computed)

    real, real_start = Sequence.reset, Scheduler.start
    patch(Sequence, "reset", reset)
    patch(Scheduler, "start", start)


def preempted_sequence_loses_its_place(patch: Patch) -> None:
    """It waits behind all requests that arrived after it."""

    def preempt(self: Scheduler, sequence: Sequence) -> None:
        real(self, sequence)
        self.waiting.remove(sequence)
        sequence.order = (sequence.order[0], next(self._numbers))
        bisect.insort(self.waiting, sequence, key=lambda one: one.order)

    real = Scheduler.preempt
    patch(Scheduler, "preempt", preempt)


def prompts_are_preempted_forever(patch: Patch) -> None:
    """Prompts without shared pages are preempted before their last chunk: every step is busy, but nothing finishes."""

    def schedule(self: Scheduler, now: float = 0.0) -> list[Any]:
        for sequence in list(self.running):
            if sequence.num_outputs == 0 and 1 < sequence.num_computed_tokens and not sequence.pending_chunks:
                self.preempt(sequence)
        return real(self, now)

    real = Scheduler.schedule
    patch(Scheduler, "schedule", schedule)


def oldest_sequence_is_preempted(patch: Patch) -> None:
    """The oldest sequence is preempted instead of the youngest."""
    patch(StepBuilder, "_last", lambda self, candidates: candidates[0])


def short_prompts_starve_a_long_one(patch: Patch) -> None:
    """A long prompt that does not fit is overtaken by every short one."""

    def make_room(self: StepBuilder, sequence: Sequence, shared: list[int], demand: Any) -> bool:
        while not (has_room := real(self, sequence, shared, demand)) and demand.waiting:
            sequence = demand.waiting.popleft()
            if not shared and self._admits and real(self, sequence, [], demand):
                count = min(len(sequence.token_ids), self._tokens_left)
                self._scheduler.start(sequence, [], count)
                self._counts[sequence] = count
                self._tokens_left -= count
        return has_room

    real = StepBuilder._make_room
    patch(StepBuilder, "_make_room", make_room)


def token_budget_off_by_one(patch: Patch) -> None:
    """A step has one token too many."""

    def schedule(self: Scheduler, now: float = 0.0) -> list[Any]:
        self.budget += 1
        try:
            return real(self, now)
        finally:
            self.budget -= 1

    real = Scheduler.schedule
    patch(Scheduler, "schedule", schedule)


def abort_leaks_pages(patch: Patch) -> None:
    """A running sequence that is aborted does not free its pages."""

    def abort(self: Engine, message: Any, outputs: list[Any]) -> None:
        sequence = self._sequences.get(message.request_id)
        if sequence is not None:
            sequence.pages = []
        real(self, message, outputs)

    real = Engine._abort
    patch(Engine, "_abort", abort)


def new_page_inserted_before_the_last(patch: Patch) -> None:
    """When a page is full, the next one is put before it in the page table."""

    def extend(self: PagePool, pages: list[int], num_tokens: int) -> bool:
        before = len(pages)
        extended = real(self, pages, num_tokens)
        if extended and before and len(pages) > before and num_tokens % self.page_size == 1:
            pages[before - 1], pages[before] = pages[before], pages[before - 1]
        return extended

    real = PagePool.extend
    patch(PagePool, "extend", extend)


def token_of_a_finished_sequence_given_to_the_next_row(patch: Patch) -> None:
    """After a sequence finishes, the next row of the batch gets its token."""
    rows: dict[Engine, list[Any]] = {}

    def commit(self: Engine, chunk: Any, result: Any, *rest: Any) -> None:
        kept = rows.setdefault(self, [])
        if chunk.sequence.num_outputs and kept and kept[-1][0].id not in self._sequences and result.sampled:
            result.sampled[0].token = kept[-1][1]
        if result.sampled:
            kept.append((chunk.sequence, result.sampled[0].token))
        real(self, chunk, result, *rest)

    real = Engine._commit
    patch(Engine, "_commit", commit)


def pages_that_are_not_finite_stay_cached(patch: Patch) -> None:
    """The next request with the same prefix reads values that are not finite."""
    patch(PagePool, "evict", lambda self, pages: [page for page in pages if self._refcounts[page] == 1])


def preempted_prompt_counted_twice(patch: Patch) -> None:
    """A prompt that is computed again after a preemption is counted again."""

    def reset(self: Sequence) -> list[int]:
        self.prompt_done = False
        return real(self)

    real = Sequence.reset
    patch(Sequence, "reset", reset)


def reset_misses_pending_pages(patch: Patch) -> None:
    """Pages that pending steps fill during a reset of the prefix cache are found after it."""
    patch(Scheduler, "reset_prefix_cache", lambda self: self.pool.evict_all())


def dropped_result_is_output(patch: Patch) -> None:
    """A finished sequence gets another token from a pending step."""

    def drop_pending(self: Sequence) -> None:
        chunks = list(self.pending_chunks)
        real(self)
        for chunk in chunks:
            chunk.dropped = False

    real = Sequence.drop_pending
    patch(Sequence, "drop_pending", drop_pending)


def overflowing_requests_end_the_engine(patch: Patch) -> None:
    """Two requests with logits that are not finite count as a broken model."""

    def check_model(self: Engine, now: float, outputs: list[Any]) -> None:
        raise error("model_broken")

    patch(Engine, "_check_model", check_model)


def broken_model_is_not_detected(patch: Patch) -> None:
    """No logits are finite any more, and the engine keeps failing request after request."""
    patch(Engine, "_check_model", lambda self, now, outputs: None)


def half_of_a_split_step_is_lost(patch: Patch) -> None:
    """A step that does not fit into memory is split in two, and only the first half runs."""
    patch(engine_module, "_halves", lambda items: [items[: -(-len(items) // 2)]])


def pages_that_are_not_finite_are_not_cleared(patch: Patch) -> None:
    """The next sequence with such a page reads values that are not finite."""

    def submit(self: Engine, chunks: list[Any]) -> Any:
        self._cleared_pages = []
        return real(self, chunks)

    real = Engine._submit
    patch(Engine, "_submit", submit)


def freed_slot_is_not_submitted(patch: Patch) -> None:
    """The executor continues with the sequence that had the slot before."""

    def free_slot(self: Scheduler, sequence: Sequence) -> None:
        real(self, sequence)
        self.freed_slots.clear()

    real = Scheduler._free_slot
    patch(Scheduler, "_free_slot", free_slot)


def pages_are_submitted_twice(patch: Patch) -> None:
    """The executor appends pages to a page table that has them already."""

    def record(self: ScheduledChunk) -> Any:
        made = real(self)
        self.sequence.num_submitted_pages -= bool(made.new_pages)
        return made

    real = ScheduledChunk.record
    patch(ScheduledChunk, "record", record)


def preempted_sequence_is_introduced_without_its_outputs(patch: Patch) -> None:
    """The tokens from before the preemption are lost."""

    def introduction(self: Sequence) -> Any:
        return msgspec.structs.replace(real(self), output_token_ids=[])

    real = Sequence.introduction
    patch(Sequence, "introduction", introduction)


def clients_are_not_charged(patch: Patch) -> None:
    """Requests are served first come, first served: a client with many requests gets more than its share."""
    patch(StepBuilder, "_rank", lambda self, demand: (demand.next.order if demand.next else (0, 0), demand.client))


def idle_clients_accumulate_credit(patch: Patch) -> None:
    """A client that used little for long starves the others once it sends many requests."""

    def charge(self: ClientShares, served: list[tuple[str, int]], unserved: set[str]) -> None:
        self._min_counter = 0
        for client, weight in served:
            self.counters[client] += weight

    patch(ClientShares, "charge", charge)


def reverse_order_within_a_client(patch: Patch) -> None:
    """The last request of a client starts first."""

    def demands(self: StepBuilder, waited: bool) -> Any:
        found = real(self, waited)
        for demand in found:
            demand.waiting.reverse()
        return found

    real = StepBuilder._demands_of_clients
    patch(StepBuilder, "_demands_of_clients", demands)


#: Bugs that show only with several clients.
UNFAIR_BUGS: list[Callable[[Patch], None]] = [
    clients_are_not_charged,
    idle_clients_accumulate_credit,
    reverse_order_within_a_client,
]

BUGS: list[Callable[[Patch], None]] = [
    decref_without_counting,
    page_inserted_before_it_is_full,
    decode_scheduled_before_its_token_is_sampled,
    whole_prompt_taken_from_the_cache,
    page_hash_without_the_prefix,
    page_hash_without_the_salt,
    reset_evicts_nothing,
    allocated_page_keeps_its_hash,
    referenced_page_stays_free,
    preempted_sequence_keeps_its_progress,
    preempted_sequence_loses_its_place,
    prompts_are_preempted_forever,
    oldest_sequence_is_preempted,
    short_prompts_starve_a_long_one,
    token_budget_off_by_one,
    abort_leaks_pages,
    new_page_inserted_before_the_last,
    token_of_a_finished_sequence_given_to_the_next_row,
    pages_that_are_not_finite_stay_cached,
    preempted_prompt_counted_twice,
    reset_misses_pending_pages,
    dropped_result_is_output,
    overflowing_requests_end_the_engine,
    broken_model_is_not_detected,
    half_of_a_split_step_is_lost,
    pages_that_are_not_finite_are_not_cleared,
    freed_slot_is_not_submitted,
    pages_are_submitted_twice,
    preempted_sequence_is_introduced_without_its_outputs,
]
