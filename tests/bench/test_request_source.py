"""Requests of a workload for an endpoint."""

from __future__ import annotations

import itertools

from aiakq.bench.client import Endpoint
from aiakq.bench.request_source import RequestSource
from aiakq.bench.workload import WorkloadRequest

ENDPOINT = Endpoint("/v1/completions", "base", True)


def test_adapters_take_turns_and_a_conversation_stays_with_its_own():
    requests = [
        WorkloadRequest("a", 1),
        WorkloadRequest("b", 1),
        WorkloadRequest("c", 1),
        WorkloadRequest("d", 1, follows=0),
    ]
    found = RequestSource(ENDPOINT, adapters=("x", "y")).prepared(requests)
    assert [request.model for request in found] == ["x", "y", "x", "x"]
    assert ENDPOINT.body(found[1])["model"] == "y" and ENDPOINT.body(requests[0])["model"] == "base"


def test_a_list_is_repeated_without_end():
    requests = [WorkloadRequest("a", 1), WorkloadRequest("b", 1)]
    found = itertools.islice(RequestSource(ENDPOINT).endless(requests), 5)
    assert [request.prompt for request in found] == ["a", "b", "a", "b", "a"]
