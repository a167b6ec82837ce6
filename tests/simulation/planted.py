"""Bugs to plant into the scheduler, the page pool and the engine: each must be found by the simulator.

A bug is a function that changes the real classes through ``patch(owner, name, value)``, which takes it back later.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import msgspec

from aiakq.errors import error
from aiakq.runtime.engine import engine as planted_engine
from aiakq.runtime.engine import sequence as planted_sequence
from aiakq.runtime.engine.client_shares import ClientShares
from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.engine.pages import ROOT, PagePool, page_hash
from aiakq.runtime.engine.scheduler import Scheduler
from aiakq.runtime.engine.sequence import ScheduledChunk, Sequence
from aiakq.runtime.engine.step_builder import StepBuilder

Patch = Callable[[object, str, Any], None]


def decref_without_counting(patch: Patch) -> None:
    """Who ends gives back pages that others still read."""

    def decref(self: PagePool, pages: list[int]) -> None:
        for page in reversed(pages):
            self._refcounts[page] = 0
            self._free[page] = None

    patch(PagePool, "decref", decref)


def page_inserted_before_it_is_full(patch: Patch) -> None:
    """Others find a page whose last positions are still to be written."""

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


def answer_scheduled_before_its_token_is_known(patch: Patch) -> None:
    """A stage would compute a token that the last stage has yet to sample."""
    patch(Scheduler, "num_wanted", lambda self, sequence: sequence.num_uncomputed_tokens)


def last_token_taken_from_the_cache(patch: Patch) -> None:
    """A prompt that is cached to its end leaves nothing to compute, so there are no logits."""

    def shared_pages(self: Scheduler, sequence: Sequence) -> list[int]:
        if not self.pool.caching or sequence.reads_whole_prompt:
            return []
        full = len(sequence.token_ids) // self.pool.page_size
        return self.pool.match(sequence.page_hashes(self.pool.page_size, full))

    patch(Scheduler, "shared_pages", shared_pages)


def hash_without_the_one_before(patch: Patch) -> None:
    """Equal tokens after different beginnings count as equal."""

    def page_hashes(self: Sequence, page_size: int, count: int) -> list[bytes]:
        tokens = self.token_ids
        return [page_hash(ROOT, tokens[at * page_size : (at + 1) * page_size]) for at in range(count)]

    patch(Sequence, "page_hashes", page_hashes)


def salt_left_out_of_the_hash(patch: Patch) -> None:
    """One tenant finds the pages of another."""
    patch(planted_sequence, "root_hash", lambda salt: ROOT)


def reset_that_forgets_nothing(patch: Patch) -> None:
    """Pages from before a reset of the prefix cache are found after it."""
    patch(PagePool, "evict_all", lambda self: None)


def reused_page_keeps_its_hash(patch: Patch) -> None:
    """A page that was handed out again is still found as what it held before."""

    def allocate(self: PagePool, count: int) -> list[int] | None:
        kept = self._hashes[:], dict(self._by_hash)
        pages = real(self, count)
        self._hashes, self._by_hash = kept
        return pages

    real = PagePool.allocate
    patch(PagePool, "allocate", allocate)


def held_page_stays_free(patch: Patch) -> None:
    """A cached page is taken over, and handed out to someone else as well."""

    def incref(self: PagePool, pages: list[int]) -> None:
        for page in pages:
            self._refcounts[page] += 1

    patch(PagePool, "incref", incref)


def preempted_sequence_keeps_its_progress(patch: Patch) -> None:
    """Its pages are gone, but what was in them counts as computed."""

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
    """It waits behind everyone who came after it."""

    def preempt(self: Scheduler, sequence: Sequence) -> None:
        real(self, sequence)
        self.waiting.remove(sequence)
        sequence.order = (sequence.order[0], next(self._numbers))
        bisect.insort(self.waiting, sequence, key=lambda one: one.order)

    real = Scheduler.preempt
    patch(Scheduler, "preempt", preempt)


def prompts_begin_again_for_ever(patch: Patch) -> None:
    """A prompt that shares no page with another is preempted before its last chunk: every step works, for nothing."""

    def schedule(self: Scheduler, now: float = 0.0) -> list[Any]:
        for sequence in list(self.running):
            if sequence.num_outputs == 0 and 1 < sequence.num_computed_tokens and not sequence.pending_chunks:
                self.preempt(sequence)
        return real(self, now)

    real = Scheduler.schedule
    patch(Scheduler, "schedule", schedule)


def first_come_is_preempted(patch: Patch) -> None:
    """Pages are taken from the oldest instead of the youngest."""
    patch(StepBuilder, "_last", lambda self, candidates: candidates[0])


def who_does_not_fit_is_overtaken(patch: Patch) -> None:
    """A long prompt waits for as long as short ones come."""

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


def budget_off_by_one(patch: Patch) -> None:
    """A step takes one token too many."""

    def schedule(self: Scheduler, now: float = 0.0) -> list[Any]:
        self.budget += 1
        try:
            return real(self, now)
        finally:
            self.budget -= 1

    real = Scheduler.schedule
    patch(Scheduler, "schedule", schedule)


def abort_leaks_pages(patch: Patch) -> None:
    """Who is stopped while running does not give its pages back."""

    def abort(self: Engine, message: Any, outputs: list[Any]) -> None:
        sequence = self._sequences.get(message.request_id)
        if sequence is not None:
            sequence.pages = []
        real(self, message, outputs)

    real = Engine._abort
    patch(Engine, "_abort", abort)


def page_in_the_wrong_place_at_a_border(patch: Patch) -> None:
    """The page for the token after a full one is put before it."""

    def extend(self: PagePool, pages: list[int], num_tokens: int) -> bool:
        before = len(pages)
        extended = real(self, pages, num_tokens)
        if extended and before and len(pages) > before and num_tokens % self.page_size == 1:
            pages[before - 1], pages[before] = pages[before], pages[before - 1]
        return extended

    real = PagePool.extend
    patch(PagePool, "extend", extend)


def row_of_who_ended_answered_to_another(patch: Patch) -> None:
    """Who moves up in the batch gets the token that was drawn for the sequence in its place before."""
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


def pages_of_who_failed_stay_findable(patch: Patch) -> None:
    """The next request with the same beginning inherits what is not finite."""
    patch(PagePool, "evict", lambda self, pages: [page for page in pages if self._refcounts[page] == 1])


def preempted_prompt_counted_twice(patch: Patch) -> None:
    """Computing a prompt again counts it again."""

    def reset(self: Sequence) -> list[int]:
        self.prompt_done = False
        return real(self)

    real = Sequence.reset
    patch(Sequence, "reset", reset)


def reset_misses_pending_pages(patch: Patch) -> None:
    """Pages that were being filled at a reset of the prefix cache are found after it."""
    patch(Scheduler, "reset_prefix_cache", lambda self: self.pool.evict_all())


def dropped_result_is_told(patch: Patch) -> None:
    """A sequence gets a token that was sampled after its end."""

    def drop_pending(self: Sequence) -> None:
        chunks = list(self.pending_chunks)
        real(self)
        for chunk in chunks:
            chunk.dropped = False

    real = Sequence.drop_pending
    patch(Sequence, "drop_pending", drop_pending)


def hostile_requests_end_the_engine(patch: Patch) -> None:
    """Two requests that overflow count as a broken model."""

    def check_model(self: Engine, now: float, outputs: list[Any]) -> None:
        raise error("model_broken")

    patch(Engine, "_check_model", check_model)


def broken_model_goes_on(patch: Patch) -> None:
    """Nothing is finite any more, and every request is told that it is its own fault."""
    patch(Engine, "_check_model", lambda self, now, outputs: None)


def half_of_a_large_step_is_lost(patch: Patch) -> None:
    """What does not fit into memory is run in halves, and only the first is."""
    patch(planted_engine, "_halves", lambda items: [items[: -(-len(items) // 2)]])


def pages_of_who_failed_are_not_cleared(patch: Patch) -> None:
    """Who gets them next computes with what is not finite."""

    def submit(self: Engine, chunks: list[Any]) -> Any:
        self._cleared_pages = []
        return real(self, chunks)

    real = Engine._submit
    patch(Engine, "_submit", submit)


def freed_slot_is_not_submitted(patch: Patch) -> None:
    """The executor goes on with the sequence that had the slot before."""

    def free_slot(self: Scheduler, sequence: Sequence) -> None:
        real(self, sequence)
        self.freed_slots.clear()

    real = Scheduler._free_slot
    patch(Scheduler, "_free_slot", free_slot)


def pages_are_submitted_again(patch: Patch) -> None:
    """The executor appends pages to a table that has them already."""

    def record(self: ScheduledChunk) -> Any:
        made = real(self)
        self.sequence.num_submitted_pages -= bool(made.new_pages)
        return made

    real = ScheduledChunk.record
    patch(ScheduledChunk, "record", record)


def preempted_sequence_is_introduced_without_its_outputs(patch: Patch) -> None:
    """What it generated before the preemption is lost."""

    def introduction(self: Sequence) -> Any:
        return msgspec.structs.replace(real(self), output_token_ids=[])

    real = Sequence.introduction
    patch(Sequence, "introduction", introduction)


def clients_are_not_charged(patch: Patch) -> None:
    """Who has most requests is served as often as it has requests."""
    patch(StepBuilder, "_rank", lambda self, demand: (demand.next.order if demand.next else (0, 0), demand.client))


def satisfied_clients_save_up(patch: Patch) -> None:
    """Who wanted little for long keeps everybody waiting once it wants much."""

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


#: Those that only show with several clients.
UNFAIR: list[Callable[[Patch], None]] = [
    clients_are_not_charged,
    satisfied_clients_save_up,
    reverse_order_within_a_client,
]

BUGS: list[Callable[[Patch], None]] = [
    decref_without_counting,
    page_inserted_before_it_is_full,
    answer_scheduled_before_its_token_is_known,
    last_token_taken_from_the_cache,
    hash_without_the_one_before,
    salt_left_out_of_the_hash,
    reset_that_forgets_nothing,
    reused_page_keeps_its_hash,
    held_page_stays_free,
    preempted_sequence_keeps_its_progress,
    preempted_sequence_loses_its_place,
    prompts_begin_again_for_ever,
    first_come_is_preempted,
    who_does_not_fit_is_overtaken,
    budget_off_by_one,
    abort_leaks_pages,
    page_in_the_wrong_place_at_a_border,
    row_of_who_ended_answered_to_another,
    pages_of_who_failed_stay_findable,
    preempted_prompt_counted_twice,
    reset_misses_pending_pages,
    dropped_result_is_told,
    hostile_requests_end_the_engine,
    broken_model_goes_on,
    half_of_a_large_step_is_lost,
    pages_of_who_failed_are_not_cleared,
    freed_slot_is_not_submitted,
    pages_are_submitted_again,
    preempted_sequence_is_introduced_without_its_outputs,
]
