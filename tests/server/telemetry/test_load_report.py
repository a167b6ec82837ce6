"""The load of the server in a header, as load balancers read it."""

from __future__ import annotations

import json

import pytest

from aiakq.server.telemetry.load_report import load_report

METRICS = {"kv_cache_usage_perc": 0.5, "num_requests_waiting": 2}


def test_text_and_json():
    wanted = "TEXT named_metrics.kv_cache_usage_perc=0.5, named_metrics.num_requests_waiting=2.0"
    assert load_report("TEXT", METRICS) == load_report("text", METRICS) == wanted
    kind, _, body = (load_report("json", METRICS) or "").partition(" ")
    assert kind == "JSON" and json.loads(body) == {"named_metrics": METRICS}


@pytest.mark.parametrize("format", ["", "BIN", "TEXT, JSON"])
def test_other_formats_are_ignored(format):
    assert load_report(format, METRICS) is None
