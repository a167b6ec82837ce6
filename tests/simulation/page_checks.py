"""Invariants of the pages of a simulated engine."""

from __future__ import annotations

from collections.abc import Container

from fake_executor import OutOfMemoryRow, PagedExecutor, Row
from simulation_config import SimulationConfig
from tracked_requests import require

from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.protocol.step import NOT_FINITE


class PageChecks:
    """Checks the pages of one engine after every step."""

    def __init__(self, engine: Engine, executor: PagedExecutor, config: SimulationConfig) -> None:
        self.engine, self.executor, self.config = engine, executor, config
        self._to_clear: set[int] = set()

    def check(self) -> None:
        """Check that no page is lost, only full pages are shared, and waiting sequences have none."""
        scheduler, P = self.engine.scheduler, self.config.page_size
        # By page: its index in the page table if it is full, otherwise -1.
        used: dict[int, int] = {}
        # Pages of rejected draft tokens are kept, and pages for the next draft tokens may be allocated already.
        lookahead = self.config.async_scheduling + 2 * self.config.max_drafts
        for sequence in scheduler.running:
            pages = sequence.pages
            require(len(pages) <= -(-(len(sequence.token_ids) + lookahead) // P), "more pages than tokens")
            num_full = sequence.num_computed_tokens // P
            for index, page in enumerate(pages):
                if page in used:
                    require(used[page] == index and index < num_full, f"page {page} is used twice")
                else:
                    used[page] = index if index < num_full else -1
        require(not any(sequence.pages for sequence in scheduler.waiting), "a waiting sequence has pages")
        require(scheduler.pool.num_free + len(used) == scheduler.pool.num_usable, "a page is neither free nor used")
        self._check_not_finite(used)

    def _check_not_finite(self, used: Container[int]) -> None:
        """Check that pages with values that are not finite are neither found in the cache nor reused uncleared."""
        uncacheable: dict[int, str] = {}
        dirty: dict[int, str] = {}
        for event in self.executor.events:
            if event is None or isinstance(event, OutOfMemoryRow):
                continue
            for one in event:
                if isinstance(one, Row):
                    dirty.clear()  # this step may have been given these pages, and written to them
                elif one.error == NOT_FINITE and not one.is_dropped:
                    uncacheable.update(dict.fromkeys(one.pages, one.row.id))
                    dirty.update(dict.fromkeys(one.written_pages, one.row.id))
                elif not one.is_dropped:
                    for page in one.written_pages:
                        uncacheable.pop(page, None)
        for page, id in uncacheable.items():
            require(self.engine.scheduler.pool._hashes[page] is None, f"a page of {id}, which failed, is cached")
        to_clear = set(self.engine._cleared_pages)
        require(self._to_clear <= to_clear | self.executor.cleared_pages, "a page that is not finite was not cleared")
        self._to_clear = to_clear
        # A step that ran out of memory wrote to pages too, but is no event.
        for page, id in () if self.executor.ran_out_of_memory else dirty.items():
            is_clean = page in to_clear or not any(self.executor.pages[page])
            is_clean |= self.config.num_stages > 1 and page in self.executor.cleared_pages
            require(page in used or is_clean, f"a page of {id}, which failed, is not cleared")
