"""Execution: requests of the engine on behalf of an HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from aiakq.errors import AiakqError, error
from aiakq.runtime.protocol.adapters import AdapterRef
from aiakq.runtime.protocol.request import Request
from aiakq.runtime.protocol.sampling_params import SamplingParams
from aiakq.server.api import execution as execution_module
from aiakq.server.api.execution import Execution
from aiakq.server.api.service_options import ServiceOptions


def execution_with(start: Callable[[Request], Any], adapter: Callable[[str], AdapterRef | None]) -> Execution:
    """An execution for the model "sql", whose requests are started by ``start``."""
    service: Any = MagicMock(model=SimpleNamespace(adapter=adapter, names=["base"]), options=ServiceOptions())
    service.state.configure_mock(manager=SimpleNamespace(start=start), observers=[], num_in_flight=0)
    scope = {"state": {"arrival_time": 1.0, "request_id": "r"}, "headers": [], "path": "/v1/embeddings"}
    request: Any = SimpleNamespace(state=SimpleNamespace(request_id="r"), scope=scope)
    execution = Execution(service, request)
    execution._payload = SimpleNamespace(model="sql", priority=None)
    return execution


def run_parts(execution: Execution, count: int) -> None:
    for _ in range(count):
        asyncio.run(execution.execute(Request("r", [], SamplingParams())))


def test_all_parts_of_a_request_have_one_version_of_its_adapter():
    """Also when another one is loaded in its place between two parts."""
    adapters = iter([AdapterRef(version, "sql", "/adapters/sql", 1) for version in ("version 1", "version 2")])
    started: list[Request] = []

    def start(request: Request) -> Any:
        started.append(request)
        return MagicMock(request=request)

    run_parts(execution_with(start, lambda name: next(adapters)), 2)
    assert [request.options.adapter and request.options.adapter.key for request in started] == ["version 1"] * 2


def test_later_parts_wait_for_room_and_the_first_does_not(monkeypatch):
    monkeypatch.setattr(execution_module, "_RETRY_SECONDS", 0)
    answers: list[bool] = [True, False, False, True]
    times: list[float] = []

    def start(request: Request) -> Any:
        if not answers.pop(0):
            raise error("engine_restarting", reason="it ended")
        times.append(request.arrival_time)
        return MagicMock(request=request)

    run_parts(execution_with(start, lambda name: None), 2)
    assert times[0] == 1.0 < times[1] and not answers, "later parts have not been waiting since the request arrived"
    answers.append(False)
    with pytest.raises(AiakqError, match="restart"):
        run_parts(execution_with(start, lambda name: None), 1)


def test_what_still_runs_is_aborted_with_the_request():
    streams: list[Any] = []

    def start(request: Request) -> Any:
        streams.append(MagicMock(request=request, sequences=[]))
        return streams[-1]

    execution = execution_with(start, lambda name: None)
    run_parts(execution, 2)
    execution.finish("abort")
    assert [stream.close.call_count for stream in streams] == [1, 1]
    assert execution.service.state.num_in_flight == 0
