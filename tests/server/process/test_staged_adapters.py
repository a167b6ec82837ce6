"""The engine process reads adapters while steps run: no step reads files, whatever was evicted or unloaded before."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lora_adapters import adapted, save_adapter, store_of

from aiakq import LLM, LoRARequest, SamplingParams
from aiakq.runtime.lora import store
from aiakq.runtime.lora.resource import AdapterResource
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.admission import admit
from aiakq.runtime.protocol.command import Abort, UnloadAdapter
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.server.process import engine_process
from aiakq.server.process.held_requests import HeldRequests
from aiakq.server.process.ipc import AdapterChecked, PrefetchAdapter, Stepped, Submit

ARGUMENTS = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 200, "enable_lora": True}


@dataclass
class Reads:
    """Reads of adapters: those of ``blocked`` wait, those of ``broken`` fail; ``names`` of all, in order."""

    blocked: str | None = None
    broken: str | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    passes: threading.Event = field(default_factory=threading.Event)
    names: list[str] = field(default_factory=list)
    in_steps: list[str] = field(default_factory=list)


@pytest.fixture
def reads(monkeypatch) -> Iterator[Reads]:
    found, read = Reads(), store.read

    def patched(adapter: AdapterRef) -> Any:
        found.names.append(adapter.name)
        if not threading.current_thread().name.startswith("staging"):
            found.in_steps.append(adapter.name)
        if adapter.name == found.blocked:
            found.begun.set()
            assert found.passes.wait(120)
        if adapter.name == found.broken:
            raise OSError(5, "Input/output error")
        return read(adapter)

    monkeypatch.setattr(store, "read", patched)
    yield found
    found.passes.set()
    assert not found.in_steps, "a step read an adapter"


class Served:
    """An engine behind ``_serve``, and a link whose other end is this object."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.checked: dict[int, AdapterChecked] = {}
        self._inbox: list[Any] = []
        self._lock = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=engine_process._serve, args=(self, llm.engine))
        self._thread.start()

    def receive_all(self, wait: bool) -> list[Any] | None:
        with self._lock:
            if wait:
                self._lock.wait_for(lambda: self._inbox or self._ended)
            taken, self._inbox = self._inbox, []
            return None if self._ended and not taken else taken

    def send(self, record: Any) -> None:
        with self._lock:
            if isinstance(record, AdapterChecked):
                self.checked[record.number] = record
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
        options = msgspec.structs.replace(made.options, adapter=ref)
        self.put(Submit.of([msgspec.structs.replace(made, options=options)]))

    def until(self, holds: Callable[[], bool]) -> None:
        with self._lock:
            assert self._lock.wait_for(holds, 120)

    def staged(self) -> list[str]:
        """Keys of the adapters that are staged and not loaded."""
        return store_of(self.llm).staging.keys

    def end(self) -> None:
        """Stop; every request has ended, and nothing is left of any."""
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
        served.append(Served(LLM(str(tiny_model("LlamaForCausalLM")), **{**ARGUMENTS, **arguments})))
        return served[-1]

    yield make
    for each in served:
        each.end()


@pytest.fixture(scope="module")
def alone(tiny_model, adapters) -> dict[LoRARequest | None, list[int]]:
    """The answer to each adapter's request in an engine without others."""
    llm = LLM(str(tiny_model("LlamaForCausalLM")), **ARGUMENTS)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    found = {}
    for adapter in (None, *adapters):
        (result,) = llm.generate({"prompt_token_ids": [5] * 20}, params, False, lora_request=adapter)
        found[adapter] = list(result.outputs[0].token_ids)
    assert len(set(map(tuple, found.values()))) > 1
    return found


def test_other_requests_continue_while_an_adapter_is_read(start, adapters, reads, alone):
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
    assert reads.names == ["adapter 1", "adapter 0"]
    served.end()
    assert served.staged() == []
    found = [served.tokens[name][:5] for name in ("held", "plain", "other", "first")]
    assert found == [alone[each] for each in (adapters[0], None, adapters[1], adapters[1])]


def test_an_adapter_that_is_evicted_before_its_request_starts_is_read_during_steps(start, adapters, reads, alone):
    """It is in memory when the request arrives, and makes room for another one before the request starts."""
    served = start(max_loras=1, max_num_seqs=2)
    served.submit("running", adapters[0], tokens=200)
    served.until(lambda: "running" in served.tokens)
    reads.blocked = "adapter 0"  # from now on
    served.submit("evicts", adapters[1], tokens=200)
    served.submit("plain", None, tokens=300)
    served.until(lambda: reads.names == ["adapter 0", "adapter 1"])
    served.submit("evicted", adapters[0])
    served.until(lambda: "running" in served.finished)
    assert reads.begun.wait(120), "it was not evicted"
    assert "evicted" not in served.finished
    served.until(lambda: {"evicts", "plain"} <= served.finished.keys())
    assert "evicted" not in served.tokens
    reads.passes.set()
    served.until(lambda: "evicted" in served.finished)
    assert reads.names == ["adapter 0", "adapter 1", "adapter 0"]
    assert served.tokens["evicted"] == alone[adapters[0]] and served.tokens["evicts"][:5] == alone[adapters[1]]


def test_an_adapter_that_is_unloaded_stays_while_a_request_waits_for_its_grammar(
    start, adapters, reads, alone, monkeypatch
):
    compiling: Future[None] = Future()

    class Compiling(HeldRequests):
        def hold(self, specs: Sequence[RequestSpec]) -> list[RequestSpec]:
            for spec in specs:
                if spec.request_id == "waits":
                    self._held.append((compiling, spec))
                    for resource in self._resources:
                        resource.expect(spec)
            return super().hold([spec for spec in specs if spec.request_id != "waits"])

    monkeypatch.setattr(engine_process, "HeldRequests", Compiling)
    served = start(max_loras=1)
    served.submit("first", adapters[0])
    served.until(lambda: "first" in served.finished)
    served.submit("waits", adapters[0])
    served.put(UnloadAdapter(served.llm._adapters.of(adapters[0]).key))
    served.submit("other", adapters[1])  # there is no room for its adapter
    served.submit("plain", None)
    served.until(lambda: "plain" in served.finished)
    compiling.set_result(None)
    served.submit("last", None)
    served.until(lambda: {"waits", "other", "last"} <= served.finished.keys())
    assert served.tokens["waits"] == alone[adapters[0]] and reads.names.count("adapter 0") == 1
    served.submit("end", None)
    served.until(lambda: "end" in served.finished)
    pool = served.llm.engine.scheduler.resource(AdapterResource).pool
    assert served.llm._adapters.of(adapters[0]).key not in pool._resident


def test_an_adapter_is_read_before_its_first_request_and_the_reply_says_why_it_cannot_be(start, adapters, reads, alone):
    served = start(max_loras=1)
    one, two = (served.llm._adapters.of(adapters[number]) for number in (0, 1))
    served.put(PrefetchAdapter(1, one))
    served.until(lambda: 1 in served.checked)
    assert served.checked[1].adapter == one and reads.names == ["adapter 0"]
    reads.broken = "adapter 1"
    for number in (2, 3):  # the second attempt reads it again
        served.put(PrefetchAdapter(number, two))
        served.until(lambda number=number: number in served.checked)
        assert served.checked[number].failure.id == "adapter_malformed"
    assert reads.names == ["adapter 0", "adapter 1", "adapter 1"]
    served.submit("request", adapters[0])
    served.until(lambda: "request" in served.finished)
    assert served.tokens["request"] == alone[adapters[0]] and reads.names.count("adapter 0") == 1


def test_an_adapter_that_is_unloaded_while_it_is_read_still_answers_its_request(start, adapters, reads, alone):
    served = start(max_loras=2)
    reads.blocked = "adapter 0"
    served.submit("held", adapters[0])
    assert reads.begun.wait(120)
    served.put(UnloadAdapter(served.llm._adapters.of(adapters[0]).key))
    served.submit("plain", None)
    served.until(lambda: "plain" in served.finished)
    reads.passes.set()
    served.until(lambda: "held" in served.finished)
    assert served.tokens["held"] == alone[adapters[0]]
    served.submit("next", adapters[1])  # a batch frees the slots of adapters that were dropped
    served.until(lambda: "next" in served.finished)
    served.end()
    assert len(store_of(served.llm).nbytes) == 1 and served.staged() == []


def test_a_cancelled_request_leaves_nothing_behind(start, adapters, reads, alone):
    served = start()
    reads.blocked = "adapter 0"
    served.submit("held", adapters[0])
    served.submit("next", adapters[1])
    assert reads.begun.wait(120)
    served.put(Abort(["held"]))
    reads.passes.set()
    served.until(lambda: "next" in served.finished)
    served.submit("again", adapters[0])
    served.until(lambda: "again" in served.finished)
    served.end()
    del served.tokens["held"]
    assert served.tokens == {"next": alone[adapters[1]], "again": alone[adapters[0]]}
    assert served.staged() == [] and served.llm.engine.preparations() == {}


@pytest.mark.parametrize("ahead", [False, True])
def test_more_adapters_than_have_room_are_read_during_steps_in_turn(ahead, start, adapters, reads, alone):
    served = start(max_loras=1, async_scheduling=ahead)
    for index in range(9):
        served.submit(f"r{index}", adapters[index % 3])
    served.until(lambda: len(served.finished) == 9)
    assert set(served.finished.values()) == {"length"}
    assert [served.tokens[f"r{index}"] for index in range(9)] == [alone[adapters[index % 3]] for index in range(9)]
    assert reads.names[:3] == ["adapter 0", "adapter 1", "adapter 2"]


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


def test_a_failure_of_the_disk_fails_the_requests_of_the_adapter_until_it_can_be_read(start, adapters, reads, alone):
    served = start(max_loras=2)
    reads.broken = "adapter 0"
    served.submit("plain", None, tokens=60)
    served.submit("lost", adapters[0])
    served.until(lambda: {"lost", "plain"} <= served.finished.keys())
    assert served.finished["plain"] == "length" and "Input/output error" in served.finished["lost"]
    reads.broken = None
    served.submit("again", adapters[0])
    served.until(lambda: "again" in served.finished)
    assert served.tokens["again"] == alone[adapters[0]]
