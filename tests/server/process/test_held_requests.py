"""Requests whose grammar is compiled or whose adapter is read: they wait, others do not, and they can be cancelled."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lora_adapters import adapted, save_adapter

from aiakq import LLM, LoRARequest, SamplingParams
from aiakq.runtime.engine.adapters import AdapterRef
from aiakq.runtime.engine.messages import ModelLimits, RequestSpec, admit
from aiakq.runtime.lora import store
from aiakq.runtime.structured.grammars import Grammar
from aiakq.server.process import engine_process
from aiakq.server.process.held_requests import HeldRequests
from aiakq.server.process.ipc import Cancel, Stepped, Submit


class Preparing:
    """An executor that only prepares."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[None]] = {}
        self.forgotten: list[str] = []

    def prepare_grammar(self, grammar: Grammar) -> Future[None] | None:
        return self.futures.setdefault(grammar.text, Future())

    def prepare_adapter(self, adapter: AdapterRef) -> Future[None] | None:
        return None if adapter.key == "resident" else self.futures.setdefault(adapter.key, Future())

    def forget_adapter(self, adapter: AdapterRef) -> None:
        self.forgotten.append(adapter.key)


def spec(id: str, regex: str = "", adapter: str = "") -> RequestSpec:
    params = SamplingParams(structured_outputs={"regex": regex} if regex else None)
    made = admit(id, [1], params, ModelLimits(9, 99, 99))
    return msgspec.structs.replace(made, adapter=AdapterRef(adapter, adapter, "/", 1)) if adapter else made


def test_only_those_with_a_grammar_wait_until_it_is_compiled():
    compiling = Preparing()
    held = HeldRequests(compiling)
    one, two, free = spec("one", "a"), spec("two", "b"), spec("free")
    assert not held.wait()
    assert held.hold([one, free, two]) == [free]
    assert held.wait() and held.ready() == []
    compiling.futures["b"].set_result(None)
    assert held.ready() == [two] and held.ready() == []
    assert held.hold([spec("late", "b")]) != []
    held.cancel(["one"])
    compiling.futures["a"].set_result(None)
    assert held.ready() == [] and not held.wait()


def test_a_request_waits_for_its_grammar_and_its_adapter():
    preparing = Preparing()
    held = HeldRequests(preparing)
    both, free = spec("both", "a", "adapter"), spec("free", adapter="resident")
    assert held.hold([both, free]) == [free]
    preparing.futures["adapter"].set_result(None)
    assert held.wait() and held.ready() == []
    preparing.futures["a"].set_result(None)
    assert held.ready() == [both]
    assert [one.request_id for one in held.hold([spec("late", "a", "adapter")])] == ["late"]


def test_an_adapter_is_dropped_when_no_request_needs_it_any_more():
    preparing = Preparing()
    held = HeldRequests(preparing)
    held.hold([spec(id, adapter=id[0]) for id in ("a1", "a2", "b1", "c1", "d1")])
    held.cancel(["a1"])
    assert preparing.forgotten == []
    held.cancel(["a2", "unknown"])
    assert preparing.forgotten == ["a"]
    for key in "bcd":
        preparing.futures[key].set_result(None)
    assert len(held.ready()) == 3
    held.started(["b1"])
    held.cancel(["b1"])
    assert preparing.forgotten == ["a"], "a step has loaded it"
    held.cancel(["c1"])
    assert preparing.forgotten == ["a", "c"], "it was released, but has not started"
    assert not held.wait() and preparing.forgotten == ["a", "c", "d"], "the engine is idle: it has ended"


@dataclass
class Reads:
    """Reads of adapters: those of ``blocked`` wait."""

    blocked: str | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    passes: threading.Event = field(default_factory=threading.Event)
    threads: list[tuple[str, bool]] = field(default_factory=list)


@pytest.fixture
def reads(monkeypatch) -> Iterator[Reads]:
    found, read = Reads(), store.read

    def patched(adapter: AdapterRef) -> Any:
        found.threads.append((adapter.name, threading.current_thread().name.startswith("staging")))
        if adapter.name == found.blocked:
            found.begun.set()
            assert found.passes.wait(120)
        return read(adapter)

    monkeypatch.setattr(store, "read", patched)
    yield found
    found.passes.set()


class Served:
    """An engine behind ``_serve``, and a link whose other end is this object."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self._inbox: list[Any] = []
        self._lock = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=engine_process._serve, args=(self, llm.engine))
        self._thread.start()

    def receive(self, wait: bool) -> list[Any] | None:
        with self._lock:
            if wait:
                self._lock.wait_for(lambda: self._inbox or self._ended)
            taken, self._inbox = self._inbox, []
            return None if self._ended and not taken else taken

    def send(self, record: Any) -> None:
        with self._lock:
            for output in record.output.outputs if isinstance(record, Stepped) else ():
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    self.finished[output.request_id] = output.error or output.finish_reason
            self._lock.notify_all()

    def put(self, record: Any) -> None:
        with self._lock:
            self._inbox.append(record)
            self._lock.notify_all()

    def submit(self, id: str, adapter: LoRARequest | None, tokens: int = 5) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        ref = None if adapter is None else self.llm._adapters.of(adapter)
        made = admit(id, [5] * 20, params, self.llm.engine.limits)
        self.put(Submit.of([msgspec.structs.replace(made, adapter=ref)]))

    def until(self, holds: Callable[[], bool]) -> None:
        with self._lock:
            assert self._lock.wait_for(holds, 120)

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._lock.notify_all()
        self._thread.join()


@pytest.fixture(scope="module")
def adapters(tiny_model, tmp_path_factory) -> list[LoRARequest]:
    from transformers import AutoModelForCausalLM

    made = []
    for number in range(3):
        model = AutoModelForCausalLM.from_pretrained(tiny_model("LlamaForCausalLM"), dtype=torch.float32)
        path = save_adapter(adapted(model, seed=number, r=3, use_dora=number == 0), tmp_path_factory.mktemp("adapter"))
        made.append(LoRARequest(f"adapter {number}", number + 1, str(path)))
    return made


@pytest.fixture
def start(tiny_model) -> Iterator[Callable[..., Served]]:
    served: list[Served] = []

    def make(**arguments: Any) -> Served:
        given = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 200, "enable_lora": True}
        served.append(Served(LLM(str(tiny_model("LlamaForCausalLM")), **{**given, **arguments})))
        return served[-1]

    yield make
    for each in served:
        each.end()


def alone(served: Served, adapter: LoRARequest | None) -> list[int]:
    """The answer of an engine that reads adapters in its steps."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    (result,) = served.llm.generate({"prompt_token_ids": [5] * 20}, params, False, lora_request=adapter)
    return list(result.outputs[0].token_ids)


def test_others_go_on_while_an_adapter_is_read(start, adapters, reads):
    served = start(max_loras=2)
    served.submit("first", adapters[1])
    served.until(lambda: "first" in served.finished)
    reads.blocked = "adapter 0"
    served.submit("held", adapters[0])
    assert reads.begun.wait(120)
    served.submit("plain", None, tokens=60)
    served.submit("other", adapters[1], tokens=60)
    served.until(lambda: {"plain", "other"} <= served.finished.keys())
    assert "held" not in served.tokens
    reads.passes.set()
    served.until(lambda: "held" in served.finished)
    assert all(is_staged for _, is_staged in reads.threads) and len(reads.threads) == 2
    served.end()
    assert served.llm.engine.executor.runner.adapters.staging.keys == []
    reference = start(max_loras=2)
    reference.end()
    found = [served.tokens[name][:5] for name in ("held", "plain", "other", "first")]
    assert found == [alone(reference, each) for each in (adapters[0], None, adapters[1], adapters[1])]
    assert len(set(map(tuple, found))) > 1


def test_a_cancelled_request_leaves_nothing_behind(start, adapters, reads):
    served = start()
    reads.blocked = "adapter 0"
    served.submit("held", adapters[0])
    served.submit("next", adapters[1])  # waits for room
    assert reads.begun.wait(120)
    served.put(Cancel(["held"]))
    reads.passes.set()
    served.until(lambda: "next" in served.finished)
    served.submit("again", adapters[0])
    served.until(lambda: "again" in served.finished)
    served.end()
    assert "held" not in served.tokens and served.llm.engine.executor.runner.adapters.staging.keys == []
    reference = start()
    reference.end()
    assert served.tokens == {"next": alone(reference, adapters[1]), "again": alone(reference, adapters[0])}


def test_more_adapters_than_have_room_are_read_beside_the_steps_in_turn(start, adapters, reads):
    served = start(max_loras=1)
    for index in range(9):
        served.submit(f"r{index}", adapters[index % 3])
    served.until(lambda: len(served.finished) == 9)
    assert set(served.finished.values()) == {"length"}
    served.end()
    reference = start()
    reference.end()
    expected = [alone(reference, each) for each in adapters]
    assert [served.tokens[f"r{index}"] for index in range(9)] == [expected[index % 3] for index in range(9)]


def test_an_adapter_that_cannot_be_read_fails_its_requests_only(start, adapters, reads, tmp_path):
    served = start(max_loras=2)
    path = Path(shutil.copytree(adapters[1].lora_path, tmp_path / "adapter"))
    mine = LoRARequest("mine", 7, str(path))
    (path / "adapter_config.json").write_text((path / "adapter_config.json").read_text() + " ")
    reads.blocked = "mine"
    served.submit("lost", mine)
    assert reads.begun.wait(120)
    served.submit("kept", adapters[2])
    shutil.rmtree(path)
    reads.passes.set()
    served.until(lambda: {"lost", "kept"} <= served.finished.keys())
    assert served.finished["kept"] == "length"
    assert served.finished["lost"].startswith("its adapter cannot be loaded: There is no adapter at")
    assert all(is_staged for _, is_staged in reads.threads)
