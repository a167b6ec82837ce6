"""Errors of an engine process that cannot load its model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiakq.arguments.engine import EngineArguments
from aiakq.errors import RESOURCES, WORKER
from aiakq.server.process import engine_process
from aiakq.server.process.ipc import Start

ALLOCATOR = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 67117056 bytes"


@pytest.mark.process_failures
@pytest.mark.parametrize(
    ("failure", "id", "code", "has_traceback"),
    [
        (RuntimeError(ALLOCATOR), "out_of_memory", RESOURCES, False),
        (MemoryError(), "out_of_memory", RESOURCES, False),
        (RuntimeError("another"), "engine_start", WORKER, True),
    ],
    ids=str,
)
def test_a_lack_of_memory_is_an_error_and_no_traceback(monkeypatch, capfd, failure, id, code, has_traceback):
    def load(*arguments: Any) -> None:
        raise failure

    sent: list[Any] = []
    start = Start(EngineArguments(), [], 0, 1)
    channel: Any = SimpleNamespace(receive=lambda: start, send_failure=sent.append)
    monkeypatch.setattr(engine_process, "_load", load)
    assert engine_process._run(channel) == code
    [found] = sent
    assert found.id == id
    assert ("Traceback" in capfd.readouterr().err) == has_traceback
