"""Gates: how they are parsed, when they pass, and which are refused."""

from __future__ import annotations

import json

import pytest

from aiakq.bench import gates
from aiakq.errors import GATE, USAGE, AiakqError

RESULT = {
    "kind": "serve",
    "completed": 10,
    "failed": 0,
    "warnings": ["text"],
    "flag": True,
    "tpot_ms": {"p50": 40.0, "p99": None},
    "prefix_cache": {"hit_rate": 0.0},
    "share": 0.985,
}


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("tpot_ms.p50>50", False),
        ("tpot_ms.p50>40", False),
        ("tpot_ms.p50>=40", True),
        ("tpot_ms.p50<50", True),
        ("tpot_ms.p50<=39.9", False),
        ("completed==10", True),
        ("completed!=10", False),
        ("completed != 1e1", False),
        (" failed > 0 ", False),
        ("prefix_cache.hit_rate<-1", False),
        # Not measured is not passed.
        ("tpot_ms.p99>50", True),
        ("tpot_ms.p99<50", True),
        ("prefix_cache.hit_rate>1%", False),
        ("share<99%", True),
        ("share<98%", False),
    ],
)
def test_operators(text, failed):
    (outcome,) = gates.evaluate(gates.parse([text]), RESULT)
    assert outcome.failed is failed


def test_several_gates_in_one_text_or_in_many():
    texts = ["completed<5, failed>0", "tpot_ms.p50>39"]
    outcomes = gates.evaluate(gates.parse(texts), RESULT)
    assert [outcome.failed for outcome in outcomes] == [False, False, True]
    problem = gates.failure(outcomes)
    assert problem.exit_code == GATE
    assert str(problem) == "1 of 3 gates failed: tpot_ms.p50>39 (measured 40)."
    assert gates.failure(outcomes[:2]) is None


@pytest.mark.parametrize(
    "text",
    ["tpot_ms.p50", "tpot_ms.p50 50", "tpot_ms.p50=50", "p50>>5", ">50", "x>fast", "x>nan", "x>inf", "x>1 y", "x>%"],
)
def test_a_gate_that_cannot_be_read_is_a_usage_error(text):
    with pytest.raises(AiakqError) as caught:
        gates.parse([text])
    assert caught.value.id == "bad_gate" and caught.value.exit_code == USAGE


@pytest.mark.parametrize(
    ("key", "named"),
    [("tpot.p50", "tpot_ms.p50"), ("tpot_ms", "tpot_ms.p50"), ("complete", "completed"), ("kind", "completed")],
)
def test_an_unknown_key_names_close_ones(key, named):
    with pytest.raises(AiakqError) as caught:
        gates.check_keys(gates.parse([f"{key}>1"]), RESULT)
    assert caught.value.id == "bad_gate"
    assert named in str(caught.value)


@pytest.mark.parametrize("key", ["kind", "warnings", "flag"])
def test_what_is_no_number_is_no_key(key):
    with pytest.raises(AiakqError, match="has no number"):
        gates.evaluate(gates.parse([f"{key}>1"]), RESULT)


def test_no_gates_pass():
    assert gates.evaluate(gates.parse([]), RESULT) == []
    assert gates.failure([]) is None


# --- changes from a baseline ----------------------------------------------------------------------------------------


def baseline(tmp_path, **values):
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({"schema_version": 1, "kind": "serve", **values}))
    return path


@pytest.mark.parametrize(
    ("text", "before", "failed"),
    [
        ("tpot_ms.p50>+5%", 39.0, False),
        ("tpot_ms.p50>+5%", 38.0, True),
        ("completed<-10%", 11, False),
        ("completed<-10%", 12, True),
    ],
)
def test_a_signed_percentage_is_a_change_from_the_baseline(tmp_path, text, before, failed):
    key = text.partition(">")[0].partition("<")[0]
    values = {"tpot_ms": {"p50": before}} if "." in key else {key: before}
    conditions = gates.parse([text])
    (outcome,) = gates.evaluate(conditions, RESULT, gates.read_baseline(conditions, baseline(tmp_path, **values)))
    assert outcome.failed is failed
    assert outcome.document()["baseline"] == before and f"of {before:g}" in outcome.describe()


def test_a_change_needs_a_baseline_with_the_number(tmp_path):
    conditions = gates.parse(["tpot_ms.p50>+5%"])
    with pytest.raises(AiakqError, match="needs --baseline FILE"):
        gates.read_baseline(conditions, None)
    with pytest.raises(AiakqError, match="the baseline lacks 'tpot_ms.p50'"):
        gates.read_baseline(conditions, baseline(tmp_path))
    with pytest.raises(AiakqError, match="has 0 as"):
        gates.read_baseline(conditions, baseline(tmp_path, tpot_ms={"p50": 0}))
    with pytest.raises(AiakqError, match="cannot be read"):
        gates.read_baseline(conditions, tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(AiakqError, match="not a record of aiakq"):
        gates.read_baseline(conditions, tmp_path / "other.json")


def test_a_baseline_of_another_machine_is_refused():
    before = {"kind": "latency", "environment": {"device_name": "A", "threads": None}}
    gates.check_machines(before, {"kind": "latency", "environment": {"device_name": "A", "threads": 4}})
    with pytest.raises(AiakqError, match="device_name 'A' and 'B'"):
        gates.check_machines(before, {"kind": "latency", "environment": {"device_name": "B"}})
    gates.check_machines(before, {"kind": "eval", "environment": {"device_name": "B"}})  # quality is the same


def test_what_a_run_will_not_measure_is_refused_beforehand():
    reasons = {"goodput_share": "no limits are given", "tpot_ms": "answers have one token"}
    gates.check_measurable(gates.parse(["completed<1"]), reasons)
    for key in ("goodput_share<90%", "tpot_ms.p50>50"):
        with pytest.raises(AiakqError, match="this run does not measure"):
            gates.check_measurable(gates.parse([key]), reasons)
