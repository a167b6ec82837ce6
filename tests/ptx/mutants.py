"""Mutants of PTX: one small mistake each, as a programmer or a compiler could make it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

#: Instructions that read or write memory, whose guard is a mask.
_MASKED = re.compile(r"^(\s*)@!?%p\d+ ((?:ld|st|atom|red)\..*)$")
_COPY = re.compile(r"^(\s*cp\.async\.c[ag]\..*, (0x[0-9a-f]+), )(%r\d+)(;.*)$")
_WAIT = re.compile(r"^(\s*cp\.async\.wait_group\s+(?:0x)?)(\d+)(;.*)$")
_SWAPPED = re.compile(r"^(\s*(?:sub|selp|setp\.(?:lt|le|gt|ge)|div|shl|shr)\.\S+\s+)(%\w+), ([^,]+), ([^,;]+)(.*;.*)$")
_PRODUCT = re.compile(r"^(\s*mma\.sync\S+ \{[^}]*\}, \{ ?)(%r\d+), (%r\d+)(.*)$")
_CONSTANT = re.compile(r"^(\s*(?:add|sub|and|or|shl|shr|mul|mad|setp|bfe|lop3|min|max)\.[^;]*[ ,])(\d+)(;.*)$")
_ATOMIC = re.compile(r"^(.*atom\.\S*)acq_rel(.*)$")


@dataclass(frozen=True)
class Mutant:
    """A line of PTX and what it becomes.

    kind  what was changed, a key of KINDS.
    """

    kind: str
    line: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the PTX with the mistake."""
        lines = text.split("\n")
        assert lines[self.line] == self.old
        lines[self.line] = self.new
        return "\n".join(lines)


def _without(*names: str) -> Callable[[str], str | None]:
    """Remove a line with one of these instructions."""
    found = re.compile(rf"^\s*(?:{'|'.join(map(re.escape, names))})\b[^;]*;")
    return lambda line: found.sub("", line, count=1) if found.match(line) else None


def _replaced(pattern: re.Pattern[str], new: Callable[[re.Match[str]], str]) -> Callable[[str], str | None]:
    def change(line: str) -> str | None:
        match = pattern.match(line)
        return new(match) if match else None

    return change


#: What becomes of a line, or None if there is nothing of the kind in it.
KINDS: dict[str, Callable[[str], str | None]] = {
    "mask dropped": _replaced(_MASKED, lambda m: m[1] + m[2]),
    "mask of a copy dropped": _replaced(_COPY, lambda m: m[1] + m[2] + m[4]),
    "operands swapped": _replaced(_SWAPPED, lambda m: f"{m[1]}{m[2]}, {m[4]}, {m[3]}{m[5]}"),
    "operands of a product swapped": _replaced(_PRODUCT, lambda m: f"{m[1]}{m[3]}, {m[2]}{m[4]}"),
    "constant off by one": _replaced(_CONSTANT, lambda m: f"{m[1]}{int(m[2]) + 1}{m[3]}"),
    "barrier removed": _without("bar.sync"),
    "wait removed": _without("cp.async.wait_group", "cp.async.wait_all", "wgmma.wait_group.sync.aligned"),
    "wait for one group less": _replaced(_WAIT, lambda m: f"{m[1]}{int(m[2]) + 1}{m[3]}"),
    "group joined to the next": _without("cp.async.commit_group"),
    "fence removed": _without("fence.proxy.async", "wgmma.fence.sync.aligned", "membar.gl", "fence.acq_rel.gpu"),
    "atomic relaxed": _replaced(_ATOMIC, lambda m: f"{m[1]}relaxed{m[2]}"),
}
#: Kinds that only change what is ordered, so that a run which they do not change may have been luck.
ORDERING = {
    "barrier removed", "wait removed", "wait for one group less", "group joined to the next", "fence removed",
    "atomic relaxed",
}  # fmt: skip


def all_mutants(text: str) -> Iterator[Mutant]:
    """All of a kernel's mutants, in the order of its lines."""
    for number, line in enumerate(text.split("\n")):
        code = line.partition("//")[0]
        for kind, change in KINDS.items():
            new = change(code)
            if new is not None and new != code:
                yield Mutant(kind, number, line, new)


def some_mutants(text: str, per_kind: int, seed: int) -> list[Mutant]:
    """At most ``per_kind`` mutants of each kind, chosen at random."""
    of_kind: dict[str, list[Mutant]] = {}
    for mutant in all_mutants(text):
        of_kind.setdefault(mutant.kind, []).append(mutant)
    chosen = random.Random(seed)
    return [mutant for found in of_kind.values() for mutant in chosen.sample(found, min(per_kind, len(found)))]
