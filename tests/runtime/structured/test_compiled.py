"""Compiled grammars: compiled for clients in turn, dropped when no request waits, and limited in number."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from aiakq.runtime.protocol.grammar import Grammar
from aiakq.runtime.protocol.vocabulary import Vocabulary
from aiakq.runtime.structured import compiled
from aiakq.runtime.structured.compiled import CompiledGrammars
from aiakq.runtime.structured.compiler import GrammarCompiler

TOKENS = [*(bytes([byte]) for byte in range(256)), b"<end>"]


@pytest.fixture
def compiler(monkeypatch) -> GrammarCompiler:
    """A compiler that waits for ``compiler.go``, and notes what it compiles in ``compiler.order``."""
    made: Any = GrammarCompiler(Vocabulary(TOKENS, [256]).resized(257, [256]))
    made.go, made.order = threading.Semaphore(0), []
    try_compile = made.try_compile

    def wait(grammar: Grammar) -> Any:
        made.go.acquire()
        made.order.append(grammar.client + grammar.text)
        return try_compile(grammar)

    monkeypatch.setattr(made, "try_compile", wait)
    return made


def of(client: str, text: str, num_bytes: int = 0) -> Grammar:
    return Grammar("regex", text, num_bytes=num_bytes, client=client)


def test_grammars_are_compiled_for_clients_in_turn(compiler):
    waiting = [compiler.prepare(of("greedy", f"{number}a")) for number in range(8)]
    waiting.append(compiler.prepare(of("other", "b")))
    compiler.go.release(9)
    for each in waiting:
        assert each.result(timeout=20) is not None
    assert compiler.order.index("otherb") <= 2


def test_grammars_without_waiting_requests_are_not_compiled(compiler):
    first = compiler.prepare(of("a", "first"))
    left: list[Future[Any]] = [compiler.prepare(of("a", "left")) for _ in range(2)]
    shared = [compiler.prepare(of("a", "shared")) for _ in range(2)]
    for each in (*left, shared[0]):
        assert each.cancel()
    compiler.go.release(9)
    assert first.result(timeout=20) and shared[1].result(timeout=20)
    assert compiler.order == ["afirst", "ashared"] and not compiler._waiting


def test_grammars_are_charged_by_their_size_and_dropped_within_the_limit(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_HELD", 10 << 20)
    store = CompiledGrammars()
    grammars = [of("a", str(number), 3 << 20) for number in range(5)]
    for grammar in grammars:
        store.add(grammar, object())
    assert store.num_bytes == 9 << 20
    assert [store.get(grammar) is not None for grammar in grammars] == [False, False, True, True, True]
    in_use = store.get(grammars[2])
    for grammar in grammars[3:]:
        store.add(of("b", grammar.text + "x", 4 << 20), object())
    assert in_use is store.get(grammars[2]) and store.get(grammars[4]) is None
    del in_use


def test_grammars_are_charged_for_what_their_masks_add(monkeypatch):
    monkeypatch.setattr(compiled, "MAX_HELD", 4 << 20)
    store = CompiledGrammars()
    kept, growing = store.add(of("a", "kept"), object()), store.add(of("a", "growing"), object())
    before = store.num_bytes
    growing.count_mask(50.0)
    assert store.num_bytes == before
    del kept
    growing.count_mask(1e6)
    assert store.num_bytes > 10 << 20 and store.get(of("a", "kept")) is None
    growing.count_mask(1e9)
    assert store.num_bytes <= compiled.MAX_GRAMMAR_HELD
    del growing
    assert store.get(of("a", "growing")) is not None  # the last one is kept


def test_large_grammars_of_a_client_wait_for_its_others_and_delay_no_small_one(compiler, monkeypatch):
    monkeypatch.setattr(compiled, "MAX_HELD", 20 << 20)
    compiler.go.release(99)
    first, second = (compiler.prepare(of("a", text, 6 << 20)) for text in ("first", "second"))
    small, other = compiler.prepare(of("a", "small")), compiler.prepare(of("b", "other", 6 << 20))
    held = [each.result(timeout=20) for each in (first, small, other)]
    assert all(held) and not second.done()
    del held, first
    gc.collect()
    assert second.result(timeout=20) is not None  # what is kept without use makes room for it
