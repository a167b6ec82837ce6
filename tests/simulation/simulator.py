"""The engine under a seeded simulator: random traffic and faults, and after every step everything that must hold.

    python tests/simulation/simulator.py --steps 10000000        many worlds, one after the other
    python tests/simulation/simulator.py --seed 17 --steps 230   one again

Sizes, arrivals, aborts, resets of the prefix cache, faults and the clock each have a random source of their own, so
that leaving one out (``--without``) leaves the others as they are: that is how a world that fails is made smaller.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable

from clients import Totals, Violation
from model import ENDS, VOCAB, Fault
from sizes import Setup
from world import World

from aiakq.runtime.protocol.command import Abort, Inbox, ResetPrefixCache
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams

#: What can be left out of a world.
PARTS = ("aborts", "resets", "faults", "priorities", "children", "ends", "owners", "stages")
#: Steps of a world before its clients stop, in a long run.
STEPS = 400
#: Part of the steps with traffic that carry a fault; of all, with those that end a world, it is more than 5 %.
FAULTS = 0.09

#: Kinds of faults; those more often that end less.
KINDS = (
    "row",
    "row",
    "row",
    "nothing",
    "poison",
    "poison",
    "all",
    "all",
    "all",
    "memory",
    "memory",
    "memory",
    "dies",
    "broken",
)


class SeededWorld(World):
    """A world in which everything is drawn."""

    def __init__(
        self,
        seed: int,
        without: Iterable[str] = (),
        totals: Totals | None = None,
        owners: int | None = None,
        stages: int | None = None,
    ) -> None:
        if owners is None:
            owners = 1 if "owners" in without else random.Random(f"{seed} owners").choice([1, 1, 1, 2, 4])
        if stages is None:
            stages = 1 if "stages" in without else random.Random(f"{seed} stages").choice([1, 1, 1, 2, 3])
        super().__init__(Setup.drawn(random.Random(f"{seed} setup"), owners, stages), totals)
        self.without = frozenset(without)
        self._draws = {
            name: random.Random(f"{seed} {name}")
            for name in ("arrivals", "aborts", "resets", "faults", "clock", "owners")
        }
        draw = self._draws["arrivals"]
        P, longest = self.setup.page_size, self.setup.max_len
        lengths = [min(longest - 2, max(1, draw.randint(0, longest // P) * P + draw.choice([-1, 0, 1]))) for _ in "abc"]
        self._beginnings = [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]

    def run(self, steps: int) -> None:
        """``steps`` with traffic and faults, then those that the clients need to be done."""
        for _ in range(steps):
            self.step(self._traffic(), self._fault())
            if self._draws["aborts"].random() < 0.002 and "aborts" not in self.without:
                self.abort_all()
        self.finish()

    def _traffic(self) -> Inbox:
        """What arrives before a step."""
        inbox: Inbox = []
        self.now += self._draws["clock"].choice([0.0, 0.001, 0.01, 0.01, 0.02, 1.0, 30.0])
        draw = self._draws["arrivals"]
        if draw.random() < self.setup.arriving and len(self.live) < self.setup.clients:
            inbox += self._request(draw)
        draw = self._draws["aborts"]
        if draw.random() < self.setup.aborting and self.clients and "aborts" not in self.without:
            # Of any age: waiting, running, just sent, ended, unknown; now and then twice.
            ids = [*self.live, f"r{len(self.clients) - 1}", "unknown"]
            victim = Abort([draw.choice(ids)])
            inbox += [victim] * draw.choice([1, 1, 2])
        if self._draws["resets"].random() < self.setup.resetting and "resets" not in self.without:
            inbox.insert(0, ResetPrefixCache())
        return inbox

    def _request(self, draw: random.Random) -> list[RequestSpec]:
        """A request, or several that share their prompt."""
        longest = min(self.setup.max_len, self.engine.limits.max_kv_tokens)
        own = [draw.randrange(VOCAB) for _ in range(draw.choice([0, 1, 2, 3, 9]))]
        prompt = (draw.choice(self._beginnings) + own) if draw.random() < 0.6 else own
        prompt = (prompt or [draw.randrange(VOCAB)])[: longest - 1]
        room = longest - len(prompt)
        max_tokens = min(room, draw.choice([0, 1, 2, 5, 10, longest]))
        ends = "ends" not in self.without
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, draw.choice([0, 0, 0, 3])),
            seed=draw.randrange(3),
            ignore_eos=draw.random() < 0.5 or not ends,
            stop_token_ids=draw.sample(range(1, ENDS), 3) if draw.random() < 0.5 and ends else None,
            prompt_logprobs=0 if draw.random() < 0.08 else None,
        )
        priority = draw.choice([0, 0, 0, -1, 2])
        salt = draw.choice(["", "", "a", "b"])
        count = draw.choice([1, 1, 1, 1, 2, 4])
        count = 1 if "children" in self.without else count
        priority = 0 if "priorities" in self.without else priority
        # Most requests are of one client, who has more of them than its share.
        owners = [f"c{owner}" for owner in range(self.setup.owners)]
        owner = self._draws["owners"].choice([*owners, *owners[:1] * len(owners)])
        return self.ask(prompt, params, count, priority, salt, owner)

    def _fault(self) -> Fault | None:
        draw = self._draws["faults"]
        kind, place = draw.choice(KINDS), draw.random()
        if draw.random() < FAULTS and "faults" not in self.without:
            return Fault(kind, place)
        return None


def line(seed: int, steps: int, without: Iterable[str], stages: int | None = None) -> str:
    """What repeats a world."""
    left_out = f" --without {','.join(sorted(without))}" if without else ""
    given = "" if stages is None else f" --stages {stages}"
    return f"python tests/simulation/simulator.py --seed {seed} --steps {steps}{left_out}{given}"


def violation(seed: int, steps: int, without: Iterable[str] = (), stages: int | None = None) -> tuple[int, str] | None:
    """The step in which a world fails, and how; None if it does not."""
    world = SeededWorld(seed, without, stages=stages)
    try:
        world.run(steps)
    except Violation as failure:
        return min(world.steps, steps), str(failure)
    return None


def smallest(seed: int, steps: int, stages: int | None = None) -> tuple[int, list[str], str]:
    """A world that fails, with as much left out as can be: its steps, what is left out, and how it fails."""
    found = violation(seed, steps, stages=stages)
    assert found is not None, "the world does not fail"
    without: list[str] = []
    for part in PARTS:
        shorter = violation(seed, found[0], [*without, part], stages)
        if shorter is not None:
            found, without = shorter, [*without, part]
    return found[0], without, found[1]


def main() -> int:
    """The command line; the exit code says whether everything held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, help="one world; without it, as many as --steps asks for")
    parser.add_argument("--first", type=int, default=0, help="the first seed of many")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--stages", type=int, help="of a pipeline, in every world; drawn if not given")
    parser.add_argument("--without", default="", help=f"of {','.join(PARTS)}, for one world")
    asked = parser.parse_args()
    without = [part for part in asked.without.split(",") if part]
    totals = Totals()
    began, told = time.process_time(), time.monotonic()
    seed = asked.first if asked.seed is None else asked.seed
    while True:
        world = SeededWorld(seed, without, totals, stages=asked.stages)
        steps = STEPS if asked.seed is None else asked.steps
        try:
            world.run(steps)
        except Violation as failure:
            print(f"seed {seed}, step {world.steps}: {failure}", flush=True)
            if asked.seed is None:
                at, left_out, how = smallest(seed, steps, asked.stages)
                print(f"{line(seed, at, left_out, asked.stages)}   # {how}", flush=True)
            return 1
        seed += 1
        now = time.monotonic()
        done = asked.seed is not None or totals.steps >= asked.steps
        if done or now - told > 30:
            told = now
            speed = totals.steps / (time.process_time() - began)
            print(f"{totals}; {speed:.0f} steps/s of CPU time, seeds to {seed - 1}", flush=True)
        if done:
            return 0


if __name__ == "__main__":
    sys.exit(main())
