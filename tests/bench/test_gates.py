"""Gates: what is read, what holds, what is refused."""

from __future__ import annotations

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
    assert str(problem) == "1 of 3 gates failed: tpot_ms.p50>39 (it is 40)."
    assert gates.failure(outcomes[:2]) is None


@pytest.mark.parametrize(
    "text", ["tpot_ms.p50", "tpot_ms.p50 50", "tpot_ms.p50=50", "p50>>5", ">50", "x>fast", "x>nan", "x>inf", "x>1 y"]
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
