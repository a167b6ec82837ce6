"""Which tests a lane runs, by how long their functions take."""

from __future__ import annotations

import json
from dataclasses import replace

import lanes
import pytest
from lanes import Lane

LANE = Lane(per_function=1.0, per_case=2.0, most_cases=60)


def cases(function: str, count: int) -> list[str]:
    return [f"{function}[{number}]" for number in range(count)]


def test_quick_functions_run_whole_and_large_grids_in_part():
    quick, grid = cases("tests/a.py::test_quick", 50), cases("tests/a.py::test_grid", 50)
    kept = lanes.chosen([*quick, *grid], LANE, {"tests/a.py::test_grid": 0.25})
    assert kept == {*quick, *(f"tests/a.py::test_grid[{number}]" for number in (0, 16, 32, 49))}


def test_a_case_that_takes_long_is_left_out_unless_its_file_has_nothing_cheaper():
    names = ["tests/a.py::test_long", "tests/a.py::test_short", "tests/b.py::test_only"]
    seconds = {"tests/a.py::test_long": 9.0, "tests/b.py::test_only": 30.0}
    assert lanes.chosen(names, LANE, seconds) == {"tests/a.py::test_short", "tests/b.py::test_only"}
    assert lanes.chosen(names, replace(LANE, every_file=False), seconds) == {"tests/a.py::test_short"}


def test_a_grid_of_short_cases_is_run_in_part_too():
    names = cases("tests/a.py::test_short", 119)
    assert lanes.chosen(names, LANE, {}) == set(names[::2])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9, 10, 20])
def test_cases_are_spread_over_the_grid(count):
    kept = lanes.spread(cases("f", 10), count)
    assert len(set(kept)) == len(kept) == min(count, 10)
    if count > 1:
        assert {kept[0], kept[-1]} == {"f[0]", "f[9]"}


def test_shards_are_parts_of_all():
    names = [name for file in range(50) for name in cases(f"tests/{file}.py::test", 4)]
    parts = [{name for name in names if lanes.in_shard(name, f"{number}/3", {})} for number in (1, 2, 3)]
    assert set.union(*parts) == set(names) and sum(map(len, parts)) == 200 and min(map(len, parts)) > 20


def test_a_shard_has_whole_files_but_for_cases_that_take_long():
    names = [*cases("tests/a.py::test_long", 40), *cases("tests/a.py::test_short", 40), "tests/a.py::test_other"]
    parts = [
        {name for name in names if lanes.in_shard(name, f"{number}/4", {"tests/a.py::test_long": 9.0})}
        for number in (1, 2, 3, 4)
    ]
    short = set(cases("tests/a.py::test_short", 40)) | {"tests/a.py::test_other"}
    assert sorted(len(part & short) for part in parts) == [0, 0, 0, 41]
    assert min(len(part - short) for part in parts) > 3


def test_ci_runs_the_quick_lane_and_all_the_rest_in_turn(monkeypatch):
    monkeypatch.setattr(lanes, "seconds_of_functions", lambda: {"tests/7.py::test": 9.0, "tests/8.py::test": 0.3})
    names = [name for file in range(40) for name in cases(f"tests/{file}.py::test", 70)]
    names += cases("tests/7.py::test_short", 2)
    quick, rest = lanes.selected(names, (), "quick", None), lanes.selected(names, (), "rest", None)
    assert quick | rest == set(names) and not quick & rest and len(rest) == 38 * 6 + 70 + 69
    parts = [lanes.selected(names, (), "ci", f"{number}/8") for number in range(1, 9)]
    assert set.union(*parts) == set(names) and all(quick < part for part in parts)
    assert sum(len(part - quick) for part in parts) == len(rest)
    with pytest.raises(ValueError, match="--shard"):
        lanes.selected(names, (), "ci", None)


def test_slow_tests_are_not_in_the_fast_lane():
    names = ["tests/a.py::test_a", "tests/a.py::test_b"]
    assert lanes.selected(names, {names[0]}, "fast", None) == {names[1]}
    assert lanes.selected(names, {names[0]}, None, None) == set(names)


def test_a_report_updates_the_durations_of_what_it_has(tmp_path, monkeypatch):
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.test_lanes" name="test_a[1]" time="1.0"/>'
        '<testcase classname="tests.test_lanes" name="test_a[2]" time="2.0"/>'
        '<testcase classname="tests.test_lanes.TestB" name="runTest" time="4.0"/>'
        '<testcase classname="tests.test_lanes" name="test_c" time="0.001"/>'
        '<testcase classname="" name="tests.test_broken" time="0.0"/></testsuite></testsuites>'
    )
    monkeypatch.setattr(lanes, "FILE", tmp_path / "durations.json")
    did_not_run = {"tests/test_cli.py::test_help": 0.5, "tests/removed.py::test_a": 3.0}
    lanes.FILE.write_text(json.dumps(did_not_run | {"tests/test_lanes.py::test_c": 0.1}))
    lanes.record(report)
    assert lanes.seconds_of_functions() == {
        "tests/test_cli.py::test_help": 0.5,
        "tests/test_lanes.py::TestB::runTest": 4.0,
        "tests/test_lanes.py::test_a": 1.5,
    }
