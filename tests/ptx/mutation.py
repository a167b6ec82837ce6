"""Mutation scores: how many mutants of a family's kernels its self-test finds on the emulator.

``python tests/ptx/mutation.py 80 [FAMILY...]`` prints the scores, and every mutant that is not found. All launches of a
family are recorded once; a fault of the unchanged kernels ends the program. A mutant is run on each of them, from the
same memory, and

found       if the emulator reports a fault, or if the self-test with the mutant fails: the error of one of its
            comparisons is more than ``SLACK`` times that of the unchanged kernels.
equivalent  if it leaves all memory as it is, for a reason that is printed (equivalence.py).
survived    otherwise.

--per-kind N  mutants of each kind and compiled kernel; 0: all of them.
--seed N      chooses others.
--gate X      exit code 1 if less than this share of mutants that are not equivalent is found in any family.
--json        lines for programs instead.
--table       the table of docs/gpu.md instead, and the survivors as errors.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ptx import device, equivalence, inputs, mutants
from ptx.device import Emulation, Launch
from ptx.mutants import Mutant
from ptx.program import Program, PtxFault, RunOptions
from ptx.text import UnknownPtx

from aiakq.kernels.triton import self_test

#: A self-test on the emulator has the same error every time; a wrong element changes it by far more than this.
SLACK = 1.02
#: Orders in which launches are repeated, for mutants that only change what is ordered.
SCHEDULES = range(1, 5)
#: Instructions that a warp may execute, as a multiple of what it does without a mistake.
ENDLESS = 20


@dataclass
class Score:
    """What became of a family's mutants: counts by kind, and those that were not found in words.

    kernels, variants, launches  of the family: kernels by name, compiled ones, and launches.
    error, truncated             of the self-test, and with sums of tensor cores that are cut off and approximations
                                 that are off by as much as they may be.
    """

    family: str
    kernels: int = 0
    variants: int = 0
    launches: int = 0
    error: float = 0.0
    truncated: float = 0.0
    found: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    equivalent: list[str] = field(default_factory=list)
    survived: list[str] = field(default_factory=list)

    @property
    def score(self) -> float:
        """The share of mutants that are not equivalent which was found."""
        found = self.found.total()
        return found / max(1, found + len(self.survived))


@dataclass(frozen=True)
class Recorded:
    """A launch with the memory before and after it."""

    launch: Launch
    before: list[bytes]
    after: list[bytes]


class Family:
    """A family of kernels, all its launches recorded."""

    def __init__(self, emulation: Emulation, family: str) -> None:
        self._emulation, self._family = emulation, family
        self._recorded: dict[Program, list[Recorded]] = {}
        launches: list[tuple[Launch, list[bytes]]] = []
        emulation.programs.clear()
        emulation.observer = lambda launch: launches.append((launch, _contents(launch)))
        self._errors = inputs.errors(family)
        assert self._errors, f"the self-test of {family} passes"
        emulation.observer = None
        emulation.options = RunOptions(truncate=True, approximate=True)
        self._truncated = inputs.errors(family)
        emulation.options = RunOptions()
        assert self._truncated, f"the self-test of {family} passes with sums that are cut off"
        for launch, before in launches:
            _restore(launch, before)
            launch.run(launch.program, RunOptions(1))
            self._recorded.setdefault(launch.program, []).append(Recorded(launch, before, _contents(launch)))

    @property
    def kernels(self) -> Iterable[Program]:
        """All compiled kernels."""
        return list(self._recorded)

    def described(self) -> Score:
        """A score without mutants."""
        return Score(
            self._family, len({program.kernel.name for program in self._recorded}), len(self._recorded),
            sum(map(len, self._recorded.values())), max(self._errors), max(self._truncated),
        )  # fmt: skip

    def judge(self, program: Program, mutant: Mutant, score: Score) -> None:
        """Find out what becomes of a mutant."""
        text = mutant.apply(program.text)
        try:
            changed = Program(text, program.shared)
        except UnknownPtx:
            return  # no assembler takes it
        outcome = self._outcome(program, changed, 1)
        words = f"{program.kernel.name}, line {mutant.line + 1}, {mutant.kind}: {mutant.old.strip()}"
        if outcome in ("differs", "same") and mutant.kind in mutants.ORDERING:
            outcome = next((o for seed in SCHEDULES if (o := self._outcome(program, changed, seed)) != "same"), "same")
        if outcome == "differs":
            self._emulation.rewrite = lambda _, given: text if given == program.text else given
            errors = inputs.errors(self._family)
            self._emulation.rewrite = None
            pairs = zip(errors, self._errors, strict=False)
            if len(errors) < len(self._errors) or any(not ours <= first * SLACK + 1e-9 for ours, first in pairs):
                outcome = "wrong results"
        if outcome == "same":
            reason = equivalence.reason(program.text, mutant, lambda other: self._unchanged(program, other))
            (score.equivalent if reason else score.survived).append(f"{words} ({reason or 'changes nothing'})")
        elif outcome == "differs":
            score.survived.append(f"{words} (changes results by less than the self-test notices)")
        else:
            score.found[mutant.kind] += 1
            score.faults[outcome] += 1

    def _outcome(self, program: Program, changed: Program, seed: int) -> str:
        """The kind of the first fault, or whether any memory is left otherwise."""
        limit = ENDLESS * max(1000, program.steps)
        for recorded in self._recorded[program]:
            _restore(recorded.launch, recorded.before)
            try:
                recorded.launch.run(changed, RunOptions(seed, limit=limit))
            except PtxFault as fault:
                return fault.kind
            if _contents(recorded.launch) != recorded.after:
                return "differs"
        return "same"

    def _unchanged(self, program: Program, text: str) -> bool:
        try:
            return self._outcome(program, Program(text, program.shared), 1) == "same"
        except UnknownPtx:
            return False


def _regions(launch: Launch) -> Iterator[tuple[int, int]]:
    """Where the memory of a launch is, and how much of it there is, each once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in launch.tensors}
    yield from sorted(storages.items())


def _contents(launch: Launch) -> list[bytes]:
    return [ctypes.string_at(begin, count) for begin, count in _regions(launch)]


def _restore(launch: Launch, contents: list[bytes]) -> None:
    for (begin, count), old in zip(_regions(launch), contents, strict=True):
        ctypes.memmove(begin, old, count)


def scored(emulation: Emulation, family: str, per_kind: int, seed: int) -> Score:
    """Judge mutants of all kernels of a family."""
    recorded = Family(emulation, family)
    score = recorded.described()
    for program in recorded.kernels:
        for mutant in mutants.some_mutants(program.text, per_kind or 10**9, seed):
            recorded.judge(program, mutant, score)
    return score


def row(score: Score) -> str:
    """A row of the table."""
    cells = [
        score.family, score.kernels, score.variants, score.launches, f"{score.error:.1e}", f"{score.truncated:.1e}",
        score.found.total(), len(score.survived), len(score.equivalent), f"{100 * score.score:.0f} %",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


HEAD = """| family | kernels | compiled | launches | worst error | least exact | found | survived | equivalent | score |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch", type=int, choices=device.SHARED)
    parser.add_argument("family", nargs="*", type=inputs.family, default=list(self_test.FAMILIES))
    parser.add_argument("--per-kind", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gate", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    emulation = device.install(given.arch)
    failed = []
    if given.table:
        print(HEAD, flush=True)
    for family in given.family:
        score = scored(emulation, family, given.per_kind, given.seed)
        if given.table:
            print(row(score), flush=True)
            print(*score.survived, sep="\n", file=sys.stderr)
        elif given.json:
            print(json.dumps(vars(score) | {"score": score.score}), flush=True)
        else:
            print(
                f"{family:20} {100 * score.score:5.1f} %: {score.found.total()} found, {len(score.survived)} survived, "
                f"{len(score.equivalent)} equivalent; by {dict(score.faults)}", flush=True,
            )  # fmt: skip
            for words in score.survived + score.equivalent:
                print("   ", words)
        if score.score < given.gate:
            failed.append(family)
    if failed:
        sys.exit(f"too many mutants survive: {', '.join(failed)}")


if __name__ == "__main__":
    main()
