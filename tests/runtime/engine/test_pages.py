"""The page pool against a reference model, and the guarantees of prefix hashes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiakq.runtime.engine.pages import ROOT, PagePool, page_hash, root_hash


def test_page_hash_depends_on_everything_before_it():
    first = page_hash(ROOT, [1, 2])
    assert first == page_hash(ROOT, [1, 2])
    assert page_hash(first, [3, 4]) != page_hash(page_hash(ROOT, [1, 9]), [3, 4])
    assert page_hash(ROOT, [1, 2]) != page_hash(ROOT, [2, 1])


def test_page_hash_depends_on_the_salt():
    roots = [root_hash({"cache salt": salt}) for salt in ("", "a", "b")]
    assert roots[0] == ROOT and len({page_hash(root, [1, 2]) for root in roots}) == 3


def test_allocate_refuses_without_taking_anything():
    pool = PagePool(4, 16)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert sorted(pool.allocate(3)) == [1, 2, 3], "page 0 is scratch"


def test_released_prefix_is_found_until_its_pages_are_needed():
    pool = PagePool(4, 2)
    pages = pool.allocate(2)
    hashes = [page_hash(ROOT, [1, 2])]
    hashes.append(page_hash(hashes[0], [3, 4]))
    for page, value in zip(pages, hashes, strict=True):
        pool.insert(page, value)
    pool.decref(pages)
    assert pool.match(hashes) == pages
    pool.allocate(2)
    # The page that was never used is allocated first, then the end of the prefix; its beginning is kept longest.
    assert pool.match(hashes) == pages[:1]


def test_pages_of_a_failed_request_are_not_found_again():
    pool = PagePool(4, 2)
    pages = pool.allocate(2)
    values = [page_hash(ROOT, [1, 2]), page_hash(ROOT, [3, 4])]
    for page, value in zip(pages, values, strict=True):
        pool.insert(page, value)
    pool.incref(pages[1:])
    assert pool.evict(pages) == pages[:1], "a shared page is not ours to clear"
    assert [pool.match([value]) for value in values] == [[], []], "while others hold it, still others could join them"


class PoolMachine(RuleBasedStateMachine):
    """Random references over a small pool; after every step the pool agrees with the lists of pages in use."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(8, 2)
        self.held: list[list[int]] = []
        self.next_token = 0

    @rule(count=st.integers(0, 5))
    def allocate(self, count):
        enough = count <= self.pool.num_free
        pages = self.pool.allocate(count)
        assert (pages is not None) == enough
        if pages:
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def decref(self, data):
        self.pool.decref(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token=st.integers(0, 3))
    def insert(self, data, token):
        pages = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        self.pool.insert(pages[0], page_hash(ROOT, [token]))

    @rule(token=st.integers(0, 3))
    def share(self, token):
        pages = self.pool.match([page_hash(ROOT, [token])])
        if pages:
            self.pool.incref(pages)
            self.held.append(pages)

    @invariant()
    def agrees(self):
        self.pool.check(self.held)
        distinct = {page for pages in self.held for page in pages}
        assert self.pool.num_free + len(distinct) == self.pool.num_usable


TestPool = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=40)
