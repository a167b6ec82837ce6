"""``bench counters``: equal numbers in every run, different ones with an extra step or copy, and the gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aiakq.arguments.comparison import CounterArguments
from aiakq.bench import counters
from aiakq.bench.counting import Counting
from aiakq.cli import main
from aiakq.errors import GATE, USAGE, AiakqError
from aiakq.runtime.executor.runner import Runner

pytestmark = pytest.mark.slow


def count(model: Path) -> dict:
    return counters.run(CounterArguments(), {"model": str(model)}, lambda *known: None).document()


@pytest.fixture(scope="module")
def counted(example_model) -> dict:
    count(example_model)  # some memory is made once per process and kept
    return count(example_model)


@pytest.fixture
def file(counted, tmp_path) -> Path:
    path = tmp_path / "counters.json"
    path.write_text(json.dumps(counters.baseline(counted)))
    return path


def changed(document: dict) -> dict[str, tuple[int, int]]:
    return {row["counter"]: (row["base"], row["new"]) for row in document["counters"] if row["verdict"] == "changed"}


def test_every_run_gives_the_same_numbers(counted, example_model):
    with FakeTensorMode():
        kept = torch.empty(8)  # tensors of torch.compile have no memory
    assert kept.device.type == "cpu"
    assert count(example_model)["counters"] == counted["counters"]


def test_the_load_uses_what_it_is_there_for(counted):
    found = counted["counters"]
    assert found["prefill.steps"] == 1 and found["prefill.prompt_tokens"] == 96
    assert found["decode.generation_tokens"] == 4 * 17 and found["decode.steps"] == 17
    assert found["preempted.preemptions"] > 0 and found["preempted.peak_pages"] == 32
    assert found["prefix.prefix_hits"] == 3 * 64
    assert found["decode.native_operations"] > 17 * 50 and found["decode.python_calls"] > 1000


def test_an_extra_copy_is_found(file, example_model, monkeypatch):
    forward = Runner.forward
    monkeypatch.setattr(Runner, "forward", lambda self, step: forward(self, step).clone())
    found = changed(counters.compare(count(example_model), file))
    before, after = found["decode.torch_copies"]
    assert after == before + 17  # one for each step
    assert found["decode.torch_bytes"][1] > found["decode.torch_bytes"][0]
    assert not {name for name in found if "native" in name or "steps" in name}


def test_an_extra_native_operation_is_found(file, example_model, monkeypatch):
    from aiakq.runtime.models.decoder import Decoder

    compute = Decoder.compute

    def twice(self, *arguments):
        compute(self, *arguments)
        return compute(self, *arguments)

    monkeypatch.setattr(Decoder, "compute", twice)
    found = changed(counters.compare(count(example_model), file))
    before, after = found["decode.native_operations"]
    assert after == before + 17 * 59


def test_memory_that_is_kept_is_found(file, example_model, monkeypatch):
    from aiakq.runtime.models.decoder import Decoder

    made = Decoder.__init__

    def keeping(self, *arguments, **named):
        made(self, *arguments, **named)
        self.kept = torch.zeros(1000)

    monkeypatch.setattr(Decoder, "__init__", keeping)
    before, after = changed(counters.compare(count(example_model), file))["loaded.tensor_bytes"]
    assert after == before + 4000


def test_functions_of_the_kernels_are_counted(counted):
    assert any(name.startswith("library.") for name in counted["details"]["prefill"]["functions"])


def test_counting_ends_with_its_block():
    with Counting() as counting:
        torch.ones(8).clone()
    before = counting.counters()
    torch.ones(8).clone()
    assert counting.counters() == before
    assert before["torch_copies"] == 1 and before["torch_bytes"] == 64


# --- comparing -----------------------------------------------------------------------------------------------------


def test_equal_counters_pass(counted, file):
    document = counters.compare(counted, file)
    assert document["verdict"] == "equal" and document["warnings"] == []


def test_python_calls_may_grow_a_little(counted, file):
    grown = dict(counted["counters"])
    grown["decode.python_calls"] = int(grown["decode.python_calls"] * 1.015)
    assert changed(counters.compare({**counted, "counters": grown}, file)) == {}
    grown["decode.python_calls"] = int(grown["decode.python_calls"] * 1.05)
    assert list(changed(counters.compare({**counted, "counters": grown}, file))) == ["decode.python_calls"]


def test_what_depends_on_another_python_is_left_out(counted, file):
    grown = {**counted["counters"], "decode.python_calls": 1, "decode.steps": 1}
    other = {**counted, "counters": grown, "environment": {**counted["environment"], "python": "3.99.1"}}
    document = counters.compare(other, file)
    assert list(changed(document)) == ["decode.steps"] and "3.99" in document["warnings"][0]


def test_another_load_is_refused(counted, file):
    config = {**counted["config"], "engine": {**counted["config"]["engine"], "max_num_batched_tokens": 64}}
    with pytest.raises(AiakqError, match="was not counted with the same load: engine differ"):
        counters.compare({**counted, "config": config}, file)


def test_the_command_writes_the_file_and_holds_against_it(example_model, tmp_path, capsys):
    path = tmp_path / "own.json"
    assert main(["bench", "counters", str(example_model), "--output", str(path)]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert counters.baseline(document) == json.loads(path.read_text()) and "native_operations" in err
    assert not {"date", "details"} & json.loads(path.read_text()).keys()
    document["counters"]["decode.steps"] += 1
    path.write_text(json.dumps(document))
    assert main(["bench", "counters", str(example_model), "--against", str(path)]) == GATE
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == "changed"
    assert "counters_changed" in err and "decode.steps 18 -> 17" in err


def test_without_a_model_the_command_fails_with_a_message(capsys):
    assert main(["bench", "counters"]) == USAGE
