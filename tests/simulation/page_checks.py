"""What must hold of the pages of a simulated engine after every step."""

from __future__ import annotations

from collections.abc import Container

from clients import must
from model import PagedExecutor, Refused, Row
from sizes import Setup

from aiakq.runtime.engine.engine import Engine
from aiakq.runtime.protocol.step import NOT_FINITE


class PageChecks:
    """Checks of one engine of these sizes and its model."""

    def __init__(self, engine: Engine, model: PagedExecutor, setup: Setup) -> None:
        self.engine, self.model, self.setup = engine, model, setup
        self._to_clear: set[int] = set()

    def check(self) -> None:
        """No page is lost, and only full pages are shared; who waits has none."""
        scheduler, P = self.engine.scheduler, self.setup.page_size
        at: dict[int, int] = {}
        # Pages of rejected draft tokens are kept, and some may be allocated for the next ones.
        most_ahead = self.setup.ahead + 2 * self.setup.drafts
        for sequence in scheduler.running:
            pages = sequence.pages
            must(len(pages) <= -(-(len(sequence.token_ids) + most_ahead) // P), "more pages than tokens")
            full = sequence.num_computed_tokens // P
            for index, page in enumerate(pages):
                if page in at:
                    must(at[page] == index and index < full, f"page {page} is in two places")
                else:
                    at[page] = index if index < full else -1
        must(not any(sequence.pages for sequence in scheduler.waiting), "who waits holds pages")
        must(scheduler.pool.num_free + len(at) == scheduler.pool.num_usable, "free and held pages are not all")
        self._check_failed(at)

    def _check_failed(self, held: Container[int]) -> None:
        """Pages of who is not finite are not found again, nor handed on as they are."""
        found: dict[int, str] = {}
        dirty: dict[int, str] = {}
        for event in self.model.events:
            if event is None or isinstance(event, Refused):
                continue
            for one in event:
                if isinstance(one, Row):
                    dirty.clear()  # this step may have got them, and written to them
                elif one.failed == NOT_FINITE and not one.dropped:
                    found.update(dict.fromkeys(one.pages, one.row.id))
                    dirty.update(dict.fromkeys(one.written, one.row.id))
                elif not one.dropped:
                    for page in one.written:
                        found.pop(page, None)
        for page, id in found.items():
            must(self.engine.scheduler.pool._hashes[page] is None, f"a page of {id}, which failed, can be found")
        to_clear = set(self.engine._cleared_pages)
        must(self._to_clear <= to_clear | self.model.cleared, "a page that is not finite was not cleared")
        self._to_clear = to_clear
        # A step that ran out of memory has written, too, and is no event.
        for page, id in () if self.model.ran_out else dirty.items():
            clean = page in to_clear or not any(self.model.pages[page])
            clean |= self.setup.stages > 1 and page in self.model.cleared
            must(page in held or clean, f"a page of {id}, which failed, is not cleared")
