"""Requests whose grammar is compiled: they wait, others do not, and they can be cancelled."""

from __future__ import annotations

import weakref
from concurrent.futures import Future

from aiakq import SamplingParams
from aiakq.runtime.engine.resources import Resource
from aiakq.runtime.protocol.admission import admit
from aiakq.runtime.protocol.command import PrepareGrammar
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.runtime.protocol.output import TokenOutput
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.server.process.held_requests import HeldRequests


class Compiling:
    """An executor that only compiles grammars."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[None]] = {}

    def prepare(self, preparation: PrepareGrammar) -> Future[None] | None:
        return self.futures.setdefault(preparation.grammar.text, Future())


def spec(id: str, regex: str = "") -> RequestSpec:
    params = SamplingParams(structured_outputs={"regex": regex} if regex else None)
    return admit(id, [1], params, ModelLimits(9, 99, 99))


def test_only_those_with_a_grammar_wait_until_it_is_compiled():
    compiling = Compiling()
    held = HeldRequests(compiling, [])
    one, two, free = spec("one", "a"), spec("two", "b"), spec("free")
    assert not held.wait()
    assert held.hold([one, free, two]) == [free]
    assert held.wait() and held.ready() == []
    compiling.futures["b"].set_result(None)
    assert held.ready() == [two] and held.ready() == []
    assert held.hold([spec("late", "b")]) != []
    held.cancel(["one"])
    assert compiling.futures["a"].cancelled()
    assert held.ready() == [] and not held.wait()


def test_resources_expect_the_sequences_that_wait_until_they_are_cancelled():
    class Expecting(Resource):
        def expect(self, spec: RequestSpec) -> None:
            expected.append(spec.request_id)

        def withdraw(self, spec: RequestSpec) -> None:
            expected.remove(spec.request_id)

    compiling, expected = Compiling(), list[str]()
    held = HeldRequests(compiling, [Expecting()])
    held.hold([spec("one", "a"), spec("free"), spec("two", "b")])
    assert expected == ["one", "two"]
    compiling.futures["b"].set_result(None)
    assert [each.request_id for each in held.ready()] == ["two"]
    held.cancel(["two", "one"])  # the engine has two
    assert expected == ["two"]


def test_grammars_stay_in_memory_until_their_requests_end():
    compiling = Compiling()
    held = HeldRequests(compiling, [])
    held.hold([spec("one", "a"), spec("two", "a")])
    compiling.futures["a"].set_result(None)
    assert len(held.ready()) == 2
    grammar = weakref.ref(compiling.futures.pop("a"))
    held.finish([TokenOutput("one", [3]), TokenOutput("two", finish_reason="stop")])
    assert grammar() is not None
    held.finish([TokenOutput("one", finish_reason="length")])
    assert grammar() is None
