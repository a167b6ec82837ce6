"""CompiledGrammars: the compiled grammars in memory, those in use and those kept for later, within a limit."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from aiakq.runtime.protocol.grammar import Grammar

#: Maximum bytes of one grammar when it is compiled, and of all that an engine keeps.
MAX_GRAMMAR_HELD, MAX_HELD = 64 << 20, 256 << 20
#: Maximum number of grammars that are kept while no request uses them.
MAX_KEPT = 256
#: Bytes of grammars that never wait for memory.
_SMALL = 1 << 20
#: A mask that takes longer than this was not known: it adds states to the grammar, at most so many bytes a microsecond.
_KNOWN_MASK_MICROSECONDS, _BYTES_PER_MICROSECOND = 100.0, 16.0


class CompiledGrammar:
    """A compiled grammar in memory.

    prototype  matcher in its initial state. Its copies share what they compute, so that it grows as they are used.
    """

    __slots__ = ("__weakref__", "_size", "_store", "prototype")

    def __init__(self, prototype: Any, store: CompiledGrammars | None = None, size: list[int] | None = None) -> None:
        self.prototype, self._store, self._size = prototype, store, size or [0]

    def count_mask(self, microseconds: float) -> None:
        """Count what a mask added that took so long."""
        if microseconds > _KNOWN_MASK_MICROSECONDS and self._store is not None:
            num_bytes = int((microseconds - _KNOWN_MASK_MICROSECONDS) * _BYTES_PER_MICROSECOND)
            self._store.grow(self._size, min(num_bytes, MAX_GRAMMAR_HELD - self._size[0]))


class CompiledGrammars:
    """The compiled grammars in memory: all in use, and those used last. Thread-safe.

    num_bytes   approximate size of all.
    on_release  called when memory was released.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.on_release: Callable[[], None] = lambda: None
        self._of_client: Counter[str] = Counter()
        self._in_memory: weakref.WeakValueDictionary[Grammar, CompiledGrammar] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()  # the one used last at the end
        self._lock = threading.RLock()  # a grammar may be released while it is held

    def get(self, grammar: Grammar) -> CompiledGrammar | None:
        """The compiled ``grammar``, if it is in memory."""
        with self._lock:
            found = self._in_memory.get(grammar)
            if found is not None:
                self._keep(grammar, found)
        return found

    def add(self, grammar: Grammar, prototype: object) -> CompiledGrammar:
        """Add a compiled grammar, for its client."""
        size = [size_of(grammar)]
        compiled = CompiledGrammar(prototype, self, size)
        with self._lock:
            self._in_memory[grammar] = compiled
            self.num_bytes += size[0]
            self._of_client[grammar.client] += size[0]
            weakref.finalize(compiled, self._release, grammar.client, size, size[0]).atexit = False
            self._keep(grammar, compiled)
        return compiled

    def has_room(self, grammar: Grammar) -> bool:
        """Whether ``grammar`` may be compiled now. Else grammars in use have to be released first; a client with
        large ones waits for its own.
        """
        num_bytes = size_of(grammar)
        if num_bytes <= _SMALL:
            return True
        with self._lock:
            self._drop_kept(lambda kept: kept.client == grammar.client and self._is_too_much(kept.client, num_bytes))
            self._drop_kept(lambda kept: self.num_bytes + num_bytes > MAX_HELD)
            if self._of_client[grammar.client] == 0:
                return True
            return not self._is_too_much(grammar.client, num_bytes) and self.num_bytes + num_bytes <= MAX_HELD

    def _is_too_much(self, client: str, num_bytes: int) -> bool:
        return self._of_client[client] + num_bytes > MAX_HELD // 2

    def _drop_kept(self, is_dropped: Callable[[Grammar], bool]) -> None:
        """Drop unused grammars, the least recently used first."""
        for kept in list(self._kept):
            if is_dropped(kept):
                del self._kept[kept]

    def grow(self, size: list[int], num_bytes: int) -> None:
        """Count that a grammar of ``size`` takes ``num_bytes`` more."""
        with self._lock:
            size[0] += num_bytes
            self.num_bytes += num_bytes
            self._trim()

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self._kept[grammar] = compiled
        self._kept.move_to_end(grammar)
        self._trim()

    def _trim(self) -> None:
        while len(self._kept) > 1 and (self.num_bytes > MAX_HELD or len(self._kept) > MAX_KEPT):
            self._kept.popitem(last=False)

    def _release(self, client: str, size: list[int], num_bytes: int) -> None:
        with self._lock:
            self.num_bytes -= size[0]
            self._of_client[client] -= num_bytes
            if self._of_client[client] <= 0:
                del self._of_client[client]
        self.on_release()


def size_of(grammar: Grammar) -> int:
    """The size of ``grammar`` when it is compiled, in bytes: as measured, else by its text."""
    return max(grammar.num_bytes, 16 * len(grammar.text) + (1 << 14))
