"""Lanes: which tests ``make test``, ``make test-fast`` and ``make test-all`` run.

Cases of a test function are alike: a lane runs as many of them as take a few seconds by ``durations.json``, spread
evenly over its parameters, and leaves out a function of which one case takes longer than that. The cheapest function of
every file is run nevertheless, unless the lane leaves out what is marked as slow. ``python tests/lanes.py JUNIT_XML``
updates ``durations.json`` from a run.

What ``make test`` leaves out runs in shards, one with every commit. A shard has whole files, so that their servers and
models are started once; only cases that take longer than those are spread.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "durations.json"
#: Seconds per case below which nothing is recorded.
NEGLIGIBLE = 0.02
#: Seconds per case above which the cases of a file are spread over the shards.
LONG = 5.0
#: The shards of twelve take about the same time with it.
SALT = 12583


@dataclass(frozen=True)
class Lane:
    """How much of a test function runs.

    per_function  seconds of all its cases.
    per_case      seconds of one case above which the function is left out.
    most_cases    at most as many, however short they are: running a test and reporting it takes time too.
    every_file    one function of every file is run, also of those that take long.
    """

    per_function: float
    per_case: float
    most_cases: int
    every_file: bool = True


LANES = {"fast": Lane(0.15, 0.4, 8, every_file=False), "quick": Lane(0.5, 1.0, 64)}
#: What the quick lane leaves out; the quick lane and a shard of that.
LANES_OF_CI = ("rest", "ci")


def seconds_of_functions() -> dict[str, float]:
    """Return the seconds of one case by function, such as ``tests/test_cli.py::test_help``."""
    found: dict[str, float] = json.loads(FILE.read_text())
    return found


def selected(node_ids: Sequence[str], slow: Collection[str], lane: str | None, shard: str | None) -> set[str]:
    """Return those of the tests that a lane and a shard run; of the lane ``ci``, only the rest is in shards.

    slow  tests that are marked as slow.
    Raises ValueError if the lane ``ci`` has no shard.
    """
    if lane == "ci" and not shard:
        raise ValueError("--lane ci needs --shard")
    seconds = seconds_of_functions()
    every = set(node_ids)
    quick: set[str] = set()
    if lane:
        limits = LANES.get(lane, LANES["quick"])
        names = [name for name in node_ids if limits.every_file or name not in slow]
        quick = chosen(names, limits, seconds)
    kept = quick if lane in LANES else every - quick
    if shard:
        kept = {name for name in kept if in_shard(name, shard, seconds)}
    return kept | quick if lane == "ci" else kept


def chosen(node_ids: Sequence[str], lane: Lane, seconds: Mapping[str, float]) -> set[str]:
    """Return those of the tests that ``lane`` runs."""
    functions: dict[str, list[str]] = defaultdict(list)
    for node_id in node_ids:
        functions[function_of(node_id)].append(node_id)
    cheapest: dict[str, str] = {}
    for function in functions:
        file = function.partition("::")[0]
        if file not in cheapest or seconds.get(function, 0.0) < seconds.get(cheapest[file], 0.0):
            cheapest[file] = function
    kept: set[str] = set()
    for function, cases in functions.items():
        took = seconds.get(function, 0.0)
        if took > lane.per_case:
            count = int(lane.every_file and function in cheapest.values())
        else:
            count = len(cases) if took * len(cases) <= lane.per_function else max(1, int(lane.per_function / took))
        kept.update(spread(cases, min(count, lane.most_cases)))
    return kept


def function_of(node_id: str) -> str:
    """Return a test's id without its parameters."""
    return node_id.partition("[")[0]


def spread(cases: Sequence[str], count: int) -> list[str]:
    """Return ``count`` of the cases, the first and the last among them if there are two."""
    if count >= len(cases):
        return list(cases)
    if count < 2:
        return list(cases[:count])
    return [cases[number * (len(cases) - 1) // (count - 1)] for number in range(count)]


def in_shard(node_id: str, shard: str, seconds: Mapping[str, float]) -> bool:
    """Return whether a test is in the shard ``I/N``, I from 1 to N; the short tests of a file are all in one."""
    number, _, count = shard.partition("/")
    part = node_id if seconds.get(function_of(node_id), 0.0) > LONG else node_id.partition("::")[0]
    return crc32(f"{SALT}{part}".encode()) % int(count) == int(number) - 1


def record(junit: Path) -> None:
    """Write the mean seconds per case of every function in a report of a run, and keep those of others."""
    cases: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(junit).iter("testcase"):
        if function := reported_function(case):
            cases[function].append(float(case.get("time", 0)))
    kept = {name: took for name, took in seconds_of_functions().items() if (ROOT / name.partition("::")[0]).is_file()}
    kept |= {name: round(sum(took) / len(took), 2) for name, took in cases.items()}
    lasting = {name: took for name, took in sorted(kept.items()) if took > NEGLIGIBLE}
    FILE.write_text(json.dumps(lasting, indent=0) + "\n")


def reported_function(case: ElementTree.Element) -> str | None:
    """Return the id of the function that an entry of a report is about, None if it is about no test of a file."""
    parts = case.get("classname", "").split(".")
    # A test's class follows the name of its file.
    for at in range(len(parts), 0, -1):
        file = Path(*parts[:at]).with_suffix(".py") if parts[0] else Path()
        if (ROOT / file).is_file():
            return "::".join([file.as_posix(), *parts[at:], case.get("name", "").partition("[")[0]])
    return None


if __name__ == "__main__":
    record(Path(sys.argv[1]))
