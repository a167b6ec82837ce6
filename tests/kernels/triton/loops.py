"""Bounds of loops in Triton's intermediate representations, before (TTIR) and after (TTGIR) the passes for a GPU.

One of those passes removes loop-carried values that it considers dead, and does not count the bounds of inner loops as
uses. An inner loop that is bounded by a carried value then has its initial value as the bound in every iteration of the
outer loop. Triton's interpreter does not run these passes, and ptxas sees only their result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"%[\w$.-]+")
_FOR = re.compile(r"scf\.for (?:unsigned )?(%[\w$.-]+) = (%[\w$.-]+) to (%[\w$.-]+) step (%[\w$.-]+)")
_CARRIED = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+)")
_RESULTS = re.compile(r"(%[\w$.-]+(?::\d+)?(?:, %[\w$.-]+(?::\d+)?)*) = ")


@dataclass
class _Operation:
    """An operation: its results, the enclosing loops that change them, and its own number if it is a loop."""

    results: list[str]
    loops: set[int]
    number: int = 0


def varying_bounds(text: str) -> int:
    """Return how many bounds of loops an enclosing loop changes, in MLIR's textual form."""
    changed_by: dict[str, set[int]] = {}  # value -> the open loops that change it
    regions: list[_Operation] = []
    found = loops = 0

    def depends(part: str) -> set[int]:
        return set().union(*(changed_by.get(name, set()) for name in _NAME.findall(part)))

    for line in map(str.strip, text.splitlines()):
        if line.startswith("} else"):
            continue
        if line.startswith("}"):
            operation = regions.pop()
            changed_by |= dict.fromkeys(operation.results, operation.loops - {operation.number})
            continue
        match = _RESULTS.match(line)
        results = [name.partition(":")[0] for name in match[1].split(", ")] if match else []
        operation = _Operation(results, depends(line[match.end() :] if match else line))
        if line.startswith("^"):  # the arguments of a block
            changed_by |= dict.fromkeys(_NAME.findall(line), regions[-1].loops)
        elif re.match(r"scf\.(yield|condition)\b|\"?tt\.\w+\.return\b", line):
            regions[-1].loops |= operation.loops
        elif loop := _FOR.search(line):
            found += sum(bool(depends(bound)) for bound in loop.groups()[1:])
            loops += 1
            operation.number = loops
            arguments = [(loop[1], loop[2]), *_CARRIED.findall(line, loop.end())]
            changed_by |= {name: depends(initial) | {loops} for name, initial in arguments}
        if line.endswith("{"):
            regions.append(operation)
        else:
            changed_by |= dict.fromkeys(operation.results, operation.loops)
    assert not regions, "a region without an end"
    return found
