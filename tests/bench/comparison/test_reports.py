"""Reports of comparisons: each in the form that its reader expects."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from aiakq.bench.comparison.reports import bencher, github_action_benchmark, junit, markdown

DOCUMENT = {
    "kind": "comparison",
    "base": "base: HEAD~1 | x",
    "new": "new: <here>",
    "margin": 0.02,
    "confidence": 0.95,
    "verdict": "worse",
    "metrics": [
        {"metric": "decode_ms", "higher_is_better": False, "base": 1.0, "new": 1.05, "ratio": 1.05, "low": 1.04}
        | {"high": 1.06, "verdict": "worse", "gated": True},
        {"metric": "output_throughput", "higher_is_better": True, "base": 50.0, "new": 40.0, "ratio": 0.8, "low": None}
        | {"high": None, "verdict": "undecided", "gated": True},
        {"metric": "load_s", "higher_is_better": False, "base": 2.0, "new": 2.0, "ratio": 1.0, "low": 0.9}
        | {"high": 1.1, "verdict": "undecided", "gated": False},
    ],
    "counters": [
        {"counter": "decode.steps", "base": 17, "new": 18, "verdict": "changed"},
        {"counter": "decode.pages", "base": 4, "new": 4, "verdict": "equal"},
    ],
    "warnings": ["Look out."],
}


def test_markdown_has_a_row_per_metric_and_per_changed_counter():
    text = markdown(DOCUMENT)
    lines = text.splitlines()
    assert lines[0] == "### aiakq bench: ❌ worse"
    assert "| decode_ms | 1 | 1.05 | +5.0 % (+4.0 to +6.0 %) | ❌ worse |" in lines
    assert "| output_throughput | 50 | 40 | -20.0 % | ❔ undecided |" in lines
    assert "| load_s | 2 | 2 | +0.0 % (-10.0 to +10.0 %) |  |" in lines
    assert "| decode.steps | 17 | 18 |" in lines and not any("decode.pages" in line for line in lines)
    assert "HEAD~1 \\| x" in text and "&lt;here>" in text and "> Look out." in text


def test_junit_has_a_case_per_gate():
    suite = ElementTree.fromstring(junit(DOCUMENT))
    assert suite.attrib == {"name": "aiakq bench", "tests": "4", "failures": "2", "skipped": "1", "errors": "0"}
    found = {case.get("name"): [child.tag for child in case] for case in suite}
    assert found == {
        "decode_ms": ["failure"],
        "output_throughput": ["skipped"],
        "decode.steps": ["failure"],
        "decode.pages": ["system-out"],
    }
    assert [failure.get("type") for failure in suite.iter("failure")] == [
        "worse",
        "changed",
    ]  # Ant's schema requires it


def test_of_github_action_benchmark_less_is_always_better():
    entries = {entry["name"]: entry for entry in json.loads(github_action_benchmark(DOCUMENT))}
    assert entries["decode_ms"] == {
        "name": "decode_ms",
        "unit": "ms",
        "value": 1.05,
        "extra": "+5.0 % (+4.0 to +6.0 %) of the base",
    }
    assert entries["1 / output_throughput"]["value"] == pytest.approx(1 / 40)
    assert entries["decode.steps"] == {"name": "decode.steps", "unit": "count", "value": 18}


def test_bencher_gets_values_with_bounds():
    measures = json.loads(bencher(DOCUMENT))["aiakq bench"]
    assert measures["decode_ms"] == pytest.approx({"value": 1.05, "lower_value": 1.04, "upper_value": 1.06})
    assert measures["output_throughput"] == {"value": 40.0}
