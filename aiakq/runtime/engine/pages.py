"""PagePool: fixed-size pages of KV memory with prefix caching.

A page holds P positions of keys and values for every layer. Page 0 is scratch for padding and is never allocated. A
full page is identified by the hash of all tokens up to its end, so that a new prompt can share pages of a common
prefix. A page without references keeps its contents and hash until it is reallocated, least recently used first.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceType

#: Hash of the empty prefix.
ROOT = b""


def root_hash(scope: Mapping[str, str]) -> bytes:
    """Return the hash of the empty prefix for requests with a ``page_scope``: pages are shared only within it."""
    root = ROOT
    for kind, value in scope.items():
        if value:
            person = f"aiakq {kind}".encode()
            root = hashlib.blake2b(root + value.encode(), digest_size=16, person=person).digest()
    return root


def page_hash(parent: bytes, token_ids: SequenceType[int]) -> bytes:
    """Return the hash (16 bytes) of a page with ``token_ids`` that follows the page with hash ``parent``."""
    return hashlib.blake2b(parent + struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=16).digest()


def media_hash(page: bytes, items: SequenceType[str]) -> bytes:
    """Return the hash of a page with the hash ``page`` in which ``items`` begin, each a position and a key."""
    return hashlib.blake2b(page + "\0".join(items).encode(), digest_size=16, person=b"aiakq media").digest()


class PagePool:
    """Allocates pages, counts their references, and looks up the pages of cached prefixes."""

    def __init__(self, num_pages: int, page_size: int, caching: bool = True) -> None:
        assert num_pages >= 2, "page 0 is scratch, so a pool needs at least two"
        self.num_pages = num_pages
        self.page_size = page_size
        self.caching = caching
        self._refcounts = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._by_hash: dict[bytes, int] = {}
        # Pages without references, least recently used first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` pages with one reference each and undefined contents.

        Returns None, without any change, if there are not enough free pages.
        """
        if count > len(self._free):
            return None
        pages = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            self._evict(page)
            self._refcounts[page] = 1
            pages.append(page)
        return pages

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold ``num_tokens``."""
        return -(-num_tokens // self.page_size)

    def extend(self, pages: list[int], num_tokens: int) -> bool:
        """Append the pages that ``pages``, those of a sequence, lack to hold ``num_tokens``.

        Returns False, without any change, if there are not enough free pages.
        """
        needed = -(-num_tokens // self.page_size) - len(pages)
        if needed > 0:
            allocated = self.allocate(needed)
            if allocated is None:
                return False
            pages += allocated
        return True

    def match(self, hashes: SequenceType[bytes]) -> list[int]:
        """Return the pages of the longest cached prefix of ``hashes``, without changing reference counts."""
        pages = []
        for value in hashes if self.caching else ():
            page = self._by_hash.get(value)
            if page is None:
                break
            pages.append(page)
        return pages

    def incref(self, pages: SequenceType[int]) -> None:
        """Add a reference to each of ``pages``, which ``match`` returned."""
        for page in pages:
            if self._refcounts[page] == 0:
                del self._free[page]
            self._refcounts[page] += 1

    def num_idle(self, pages: SequenceType[int]) -> int:
        """Return how many of ``pages`` have no reference; ``incref`` would remove these from the free list."""
        return sum(self._refcounts[page] == 0 for page in pages)

    def decref(self, pages: SequenceType[int]) -> None:
        """Drop one reference of each page. Pages at the end of a sequence are reused before those at its start."""
        for page in reversed(pages):
            self._refcounts[page] -= 1
            assert self._refcounts[page] >= 0, f"page {page} has fewer references than were dropped"
            if self._refcounts[page] == 0:
                self._free[page] = None
                if self._hashes[page] is None:
                    self._free.move_to_end(page, last=False)

    def insert(self, page: int, value: bytes) -> None:
        """Insert a full page into the prefix cache, unless a page with the same hash is already cached."""
        if self.caching and value not in self._by_hash and self._hashes[page] is None:
            self._by_hash[value] = page
            self._hashes[page] = value

    def evict(self, pages: SequenceType[int]) -> list[int]:
        """Remove ``pages`` from the prefix cache; return those with a single reference, which are not shared."""
        for page in pages:
            self._evict(page)
        return [page for page in pages if self._refcounts[page] == 1]

    def evict_all(self) -> None:
        """Clear the prefix cache, without changing reference counts."""
        self._by_hash.clear()
        self._hashes = [None] * self.num_pages

    def _evict(self, page: int) -> None:
        value = self._hashes[page]
        if value is not None:
            del self._by_hash[value]
            self._hashes[page] = None

    def check(self, held: SequenceType[SequenceType[int]]) -> None:
        """Assert that the pool is consistent with ``held``, the page lists of all live sequences."""
        counts = [0] * self.num_pages
        for pages in held:
            for page in pages:
                counts[page] += 1
        assert counts == self._refcounts, "reference counts and sequences disagree"
        assert counts[0] == 0, "the scratch page was allocated"
        free = {page for page in range(1, self.num_pages) if counts[page] == 0}
        assert free == set(self._free), "free list and reference counts disagree"
        for value, page in self._by_hash.items():
            assert self._hashes[page] == value, "the hash tables disagree"
        assert sum(value is not None for value in self._hashes) == len(self._by_hash), "a hash is lost"
