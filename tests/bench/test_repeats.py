"""Several runs as one record."""

from __future__ import annotations

import pytest

from aiakq.bench import repeats
from aiakq.records import Record


def record(p50: float | None, completed: int, seed: int = 1, **more) -> Record:
    return Record("serve", seed, {"model": "m"}, {"ttft_ms": {"p50": p50}, "completed": completed, **more}, {}, ("w",))


def test_numbers_are_means_with_intervals_and_requests_are_added_up():
    joined = repeats.join([record(9.0, 5), record(10.0, 6, 2), record(11.0, 7, 3)])
    assert joined.metrics["ttft_ms"]["p50"] == 10.0 and joined.metrics["completed"] == 18
    bounds = joined.metrics["intervals"]["ttft_ms"]["p50"]
    # Student's t with two degrees of freedom, 4.303, times 1 / sqrt(3).
    assert (bounds["low"], bounds["high"]) == pytest.approx((10 - 2.4842, 10 + 2.4842), abs=1e-3)
    assert "completed" not in joined.metrics["intervals"]
    assert joined.warnings == ("w",) and joined.config["repeats"] == 3
    assert [run["seed"] for run in joined.metrics["runs"]] == [1, 2, 3]


def test_what_one_run_did_not_measure_has_no_number():
    joined = repeats.join([record(9.0, 5), record(None, 5)])
    assert joined.metrics["ttft_ms"]["p50"] is None
    assert joined.metrics["intervals"]["ttft_ms"]["p50"] == {"low": None, "high": None}


def test_timings_are_put_together_and_kept_once():
    joined = repeats.join([record(9.0, 1, detailed={"ttfts": [1]}), record(9.0, 1, detailed={"ttfts": [2]})])
    assert joined.metrics["detailed"] == {"ttfts": [1, 2]}
    assert all("detailed" not in run for run in joined.metrics["runs"])


def test_acceptance_by_position_is_a_mean_where_runs_have_fewer_positions():
    runs = [record(1.0, 1, speculation={"acceptance_by_position": shares}) for shares in ([0.8, 0.4], [0.6])]
    assert repeats.join(runs).metrics["speculation"]["acceptance_by_position"] == pytest.approx([0.7, 0.2])
