"""Whatever happens while an adapter is read, only its own check fails."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from aiakq.runtime.lora import requests
from aiakq.runtime.protocol.limits import ModelLimits
from aiakq.server.process.adapter_checks import AdapterChecks
from aiakq.server.process.ipc import CheckAdapter


class PanicException(BaseException):
    """How a native library panics: not as an Exception."""


@pytest.mark.parametrize("problem", [PanicException("index out of bounds"), OSError("no"), MemoryError()])
def test_a_panic_of_a_native_library_fails_the_check_alone(monkeypatch, problem):
    def fail(*arguments):
        raise problem

    monkeypatch.setattr(requests, "check_adapter", fail)
    engine: Any = SimpleNamespace(limits=ModelLimits(10, 20, 30), scheduler=SimpleNamespace(resource=lambda kind: None))
    checks = AdapterChecks(engine)
    checks.start(CheckAdapter(3, "a", "/nowhere", None))
    deadline = time.monotonic() + 20
    while not (done := checks.done()):
        assert time.monotonic() < deadline
        checks.wait()
    assert done[0].number == 3 and "adapter_malformed" in repr(done[0].failure)
