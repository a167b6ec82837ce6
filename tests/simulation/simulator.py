"""Run simulations of the engine with random traffic and faults, and check its invariants after every step.

    python tests/simulation/simulator.py --steps 10000000        many simulations, one after the other
    python tests/simulation/simulator.py --seed 17 --steps 230   one simulation

Sizes, arrivals, aborts, resets of the prefix cache, faults, clients and the clock each have a random generator, so that
leaving one out (``--without``) does not change the others. This is how a failing simulation is minimized.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable

from fake_executor import Fault
from simulated_model import NUM_STOP_TOKENS, VOCAB
from simulation import Simulation
from simulation_config import SimulationConfig
from tracked_requests import Totals, Violation

from aiakq.runtime.protocol.command import Abort, Inbox, ResetPrefixCache
from aiakq.runtime.protocol.request import RequestSpec
from aiakq.runtime.protocol.sampling_params import SamplingParams

#: What can be left out of a simulation.
PARTS = ("aborts", "resets", "faults", "priorities", "choices", "stops", "clients", "stages")
#: Steps with traffic of each simulation in a run of many.
STEPS = 400
#: Probability of a fault in a step with traffic. Of all steps, with those that finish the requests, it is above 5 %.
FAULT_RATE = 0.09

#: Kinds of faults, more of those that end fewer requests.
FAULT_KINDS = (
    *("nan_row", "nan_row", "nan_row"),
    "no_tokens",
    *("nan_cache", "nan_cache"),
    *("nan_step", "nan_step", "nan_step"),
    *("out_of_memory", "out_of_memory", "out_of_memory"),
    "engine_death",
    "broken_model",
)


class SeededSimulation(Simulation):
    """A simulation whose configuration, traffic and faults follow from a seed."""

    def __init__(
        self,
        seed: int,
        without: Iterable[str] = (),
        totals: Totals | None = None,
        num_clients: int | None = None,
        num_stages: int | None = None,
    ) -> None:
        if num_clients is None:
            num_clients = 1 if "clients" in without else random.Random(f"{seed} clients").choice([1, 1, 1, 2, 4])
        if num_stages is None:
            num_stages = 1 if "stages" in without else random.Random(f"{seed} stages").choice([1, 1, 1, 2, 3])
        super().__init__(SimulationConfig.sample(random.Random(f"{seed} config"), num_clients, num_stages), totals)
        self.without = frozenset(without)
        self._rngs = {
            name: random.Random(f"{seed} {name}")
            for name in ("arrivals", "aborts", "resets", "faults", "clock", "clients")
        }
        rng = self._rngs["arrivals"]
        P, longest = self.config.page_size, self.config.max_len
        lengths = [min(longest - 2, max(1, rng.randint(0, longest // P) * P + rng.choice([-1, 0, 1]))) for _ in "abc"]
        self._shared_prefixes = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]

    def run(self, steps: int) -> None:
        """Run ``steps`` with traffic and faults, then as many as finish the requests."""
        for _ in range(steps):
            self.step(self._traffic(), self._fault())
            if self._rngs["aborts"].random() < 0.002 and "aborts" not in self.without:
                self.abort_all()
        self.finish()

    def _traffic(self) -> Inbox:
        """Return what arrives before a step."""
        inbox: Inbox = []
        self.now += self._rngs["clock"].choice([0.0, 0.001, 0.01, 0.01, 0.02, 1.0, 30.0])
        rng = self._rngs["arrivals"]
        if rng.random() < self.config.arrival_rate and len(self.unfinished) < self.config.max_unfinished:
            inbox += self._request(rng)
        rng = self._rngs["aborts"]
        if rng.random() < self.config.abort_rate and self.requests and "aborts" not in self.without:
            # Any request: waiting, running, just sent, finished, unknown; sometimes twice.
            ids = [*self.unfinished, f"r{len(self.requests) - 1}", "unknown"]
            abort = Abort([rng.choice(ids)])
            inbox += [abort] * rng.choice([1, 1, 2])
        if self._rngs["resets"].random() < self.config.reset_rate and "resets" not in self.without:
            inbox.insert(0, ResetPrefixCache())
        return inbox

    def _request(self, rng: random.Random) -> list[RequestSpec]:
        """Return a request, or several that share their prompt."""
        longest = min(self.config.max_len, self.engine.limits.max_kv_tokens)
        own = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 2, 3, 9]))]
        prompt = (rng.choice(self._shared_prefixes) + own) if rng.random() < 0.6 else own
        prompt = (prompt or [rng.randrange(VOCAB)])[: longest - 1]
        max_tokens = min(longest - len(prompt), rng.choice([0, 1, 2, 5, 10, longest]))
        stops = "stops" not in self.without
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, rng.choice([0, 0, 0, 3])),
            seed=rng.randrange(3),
            ignore_eos=rng.random() < 0.5 or not stops,
            stop_token_ids=rng.sample(range(1, NUM_STOP_TOKENS), 3) if rng.random() < 0.5 and stops else None,
            prompt_logprobs=0 if rng.random() < 0.08 else None,
        )
        priority = rng.choice([0, 0, 0, -1, 2])
        salt = rng.choice(["", "", "a", "b"])
        count = rng.choice([1, 1, 1, 1, 2, 4])
        count = 1 if "choices" in self.without else count
        priority = 0 if "priorities" in self.without else priority
        # The first client sends more than its share.
        clients = [f"c{number}" for number in range(self.config.num_clients)]
        client = self._rngs["clients"].choice([*clients, *clients[:1] * len(clients)])
        return self.add_request(prompt, params, count, priority, cache_salt=salt, client=client)

    def _fault(self) -> Fault | None:
        rng = self._rngs["faults"]
        kind, position = rng.choice(FAULT_KINDS), rng.random()
        if rng.random() < FAULT_RATE and "faults" not in self.without:
            return Fault(kind, position)
        return None


def command_line(seed: int, steps: int, without: Iterable[str], num_stages: int | None = None) -> str:
    """Return the command that repeats a simulation."""
    command = f"python tests/simulation/simulator.py --seed {seed} --steps {steps}"
    command += f" --without {','.join(sorted(without))}" if without else ""
    return command if num_stages is None else f"{command} --stages {num_stages}"


def violation(
    seed: int, steps: int, without: Iterable[str] = (), num_stages: int | None = None
) -> tuple[int, str] | None:
    """Return the step in which a simulation fails, and the message; None if it does not fail."""
    simulation = SeededSimulation(seed, without, num_stages=num_stages)
    try:
        simulation.run(steps)
    except Violation as failure:
        return min(simulation.steps, steps), str(failure)
    return None


def minimized(seed: int, steps: int, num_stages: int | None = None) -> tuple[int, list[str], str]:
    """Leave as much out of a failing simulation as possible; return its steps, what is left out, and the message."""
    found = violation(seed, steps, num_stages=num_stages)
    assert found is not None, "the simulation does not fail"
    without: list[str] = []
    for part in PARTS:
        shorter = violation(seed, found[0], [*without, part], num_stages)
        if shorter is not None:
            found, without = shorter, [*without, part]
    return found[0], without, found[1]


def main() -> int:
    """Run the command line; return 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, help="run one simulation; without it, as many as --steps needs")
    parser.add_argument("--first", type=int, default=0, help="the first seed of many")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--stages", type=int, help="of a pipeline, in every simulation (default: random)")
    parser.add_argument("--without", default="", help=f"of {','.join(PARTS)}, for one simulation")
    args = parser.parse_args()
    without = [part for part in args.without.split(",") if part]
    totals = Totals()
    began, reported = time.process_time(), time.monotonic()
    seed = args.first if args.seed is None else args.seed
    while True:
        simulation = SeededSimulation(seed, without, totals, num_stages=args.stages)
        steps = STEPS if args.seed is None else args.steps
        try:
            simulation.run(steps)
        except Violation as failure:
            print(f"seed {seed}, step {simulation.steps}: {failure}", flush=True)
            if args.seed is None:
                at, left_out, message = minimized(seed, steps, args.stages)
                print(f"{command_line(seed, at, left_out, args.stages)}   # {message}", flush=True)
            return 1
        seed += 1
        now = time.monotonic()
        done = args.seed is not None or totals.steps >= args.steps
        if done or now - reported > 30:
            reported = now
            speed = totals.steps / (time.process_time() - began)
            print(f"{totals}; {speed:.0f} steps/s of CPU time, seeds to {seed - 1}", flush=True)
        if done:
            return 0


if __name__ == "__main__":
    sys.exit(main())
