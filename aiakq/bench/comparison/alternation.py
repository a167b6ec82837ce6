"""``bench ab``: two sides measured in alternation, until the intervals of their ratios allow a verdict.

The unit is a round: both sides start anew, and then take turns (base, new, new, base, ...) with the same prompts. A
round gives one ratio per metric, of the lower quartiles of its turns, which what else runs on the machine hardly moves.
Turns of one process are not independent: where its memory lies makes a side slower by percents until it is started
again. So intervals come from the spread of the rounds.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from aiakq.arguments.comparison import AlternationArguments
from aiakq.bench import workload
from aiakq.bench.comparison import statistics
from aiakq.bench.comparison.compare import metric_row, verdict_of
from aiakq.bench.comparison.process import SideProcess
from aiakq.bench.comparison.served_side import ServedSide
from aiakq.bench.comparison.sides import Side, fresh_libraries, open_side
from aiakq.bench.comparison.statistics import UNDECIDED, WORSE, Ratio, SequentialPlan
from aiakq.bench.summary import percentile
from aiakq.errors import error
from aiakq.records import Record, environment

#: What each turn measures -> its name there, and what its number is multiplied with: in a process with an engine.
METRICS = {
    "prefill_ms": ("prefill_s", 1e3),
    "decode_ms": ("decode_s", 1e3),
    "peak_mb": ("peak_bytes", 1e-6),
    "decode_mean_ms": ("decode_mean_s", 1e3),
}
#: The same of a server.
SERVED_METRICS = {
    "ttft_ms": ("ttft_s", 1e3),
    "tpot_ms": ("tpot_s", 1e3),
    "e2el_ms": ("e2el_s", 1e3),
    "peak_mb": ("peak_bytes", 1e-6),
    "cpu_ms": ("cpu_s", 1e3),
}
#: Those that decide unless others are chosen.
GATED, SERVED_GATED = ("prefill_ms", "decode_ms", "peak_mb"), ("ttft_ms", "tpot_ms", "peak_mb")
#: Turns of each side that are not measured, and the fewest that are, in a round.
WARM_UPS, MIN_TURNS = 2, 4
#: The percentile of a round's turns that stands for them.
QUARTILE = 25

#: Called with the rounds done, the most there can be, and what is known so far.
Progress = Callable[[int, int, str], None]
#: By metric: base and new of one round.
Round = dict[str, tuple[float, float]]


@dataclass
class Alternation:
    """The state of a comparison. ``bounds`` are the intervals of the last look."""

    options: AlternationArguments
    sides: tuple[Side, Side]
    seed: int
    gated: tuple[str, ...]
    rounds: list[Round] = field(default_factory=list)
    bounds: dict[str, Ratio] = field(default_factory=dict)
    same_tokens: bool = True
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> SequentialPlan:
        options = self.options
        return SequentialPlan(options.min_rounds, options.max_rounds, len(self.gated), 1 - options.confidence / 100)

    def measure_round(self) -> None:
        """Start both sides and let them take turns. Raises ``side_failed``."""
        number, options = len(self.rounds), self.options
        load = {"batch_size": options.batch_size, "input_len": options.input_len, "output_len": options.output_len}
        order = (0, 1) if number % 2 == 0 else (1, 0)
        turns: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
        with contextlib.ExitStack() as stack:
            workers: dict[int, SideProcess | ServedSide] = {}
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aiakq-ab-")))
            libraries = fresh_libraries(self.sides, folder)
            for side in order:
                given = (self.sides[side], load, options.timeout_s, libraries[side])
                workers[side] = ServedSide(*given) if options.serve else SideProcess(*given)
                stack.enter_context(workers[side])
            loaded = {side: workers[side].ready() for side in order}
            self.facts = {self.sides[side].name: facts for side, facts in loaded.items()}
            seeds = iter(range(self.seed + number * 10**6, self.seed + (number + 1) * 10**6))
            for seed in (next(seeds) for _ in range(WARM_UPS)):
                for side in order:
                    workers[side].measure(seed)
            began = time.monotonic()
            while len(turns[0]) < MIN_TURNS or time.monotonic() - began < options.round_seconds:
                seed = next(seeds)
                for side in order:
                    turns[side].append(workers[side].measure(seed))
                order = (order[1], order[0])
        self._add(turns, loaded)

    def _add(self, turns: Sequence[Sequence[Mapping[str, Any]]], loaded: Mapping[int, Mapping[str, Any]]) -> None:
        found: Round = {"load_s": (loaded[0]["load_s"], loaded[1]["load_s"])}
        for name, (key, factor) in metrics_of(self.options).items():
            sides = [sorted(factor * turn[key] for turn in each if turn[key] is not None) for each in turns]
            if all(sides) and sides[0][0] > 0 and sides[1][0] > 0:
                found[name] = (percentile(sides[0], QUARTILE), percentile(sides[1], QUARTILE))
        self.same_tokens &= all(one["digest"] == two["digest"] for one, two in zip(*turns, strict=True))
        self.rounds.append(found)

    def look(self) -> None:
        """Find the intervals that the rounds so far give."""
        for name in self.names():
            # Metrics that decide nothing get plain intervals: no verdict is promised about them.
            alpha = self.plan.alpha_of_look if name in self.gated else self.plan.alpha
            found = statistics.paired_ratio([math.log(each[name][1] / each[name][0]) for each in self.rounds], alpha)
            self.bounds[name] = found

    def names(self) -> list[str]:
        """The metrics that every round has."""
        return [name for name in self.rounds[0] if all(name in each for each in self.rounds)]

    def verdicts(self) -> dict[str, str]:
        """The verdict on every gated metric after the last look."""
        margin = self.options.margin / 100
        return {name: self.bounds[name].verdict(margin) if name in self.bounds else UNDECIDED for name in self.gated}

    @property
    def decided(self) -> bool:
        """Whether no further round is needed: one metric is worse, or none is open."""
        verdicts = self.verdicts().values()
        return WORSE in verdicts or UNDECIDED not in verdicts

    def noise_warnings(self) -> list[str]:
        """What undecided metrics would need: their intervals are wider than the margin."""
        margin, found = math.log1p(self.options.margin / 100), []
        for name, verdict in self.verdicts().items():
            bound = self.bounds.get(name)
            if verdict != UNDECIDED or bound is None or bound.high is None:
                continue
            half = math.log(bound.high / bound.value)
            if half > margin:
                # The width falls with the square root of the number of rounds.
                rounds = math.ceil(len(self.rounds) * (half / margin) ** 2)
                found.append(
                    f"{name} is known to {100 * math.expm1(half):.1f} % after {len(self.rounds)} rounds, which is more "
                    f"than the margin of {self.options.margin:g} %: with this noise it takes about {rounds} rounds. "
                    "Use a quieter machine, more rounds and minutes, or a wider --margin."
                )
        return found

    def rows(self) -> list[dict[str, Any]]:
        """The metrics for JSON: geometric means of the rounds, ratios with intervals, verdicts."""
        rows = []
        for name in self.names():
            base, new = (math.exp(fmean(math.log(each[name][side]) for each in self.rounds)) for side in (0, 1))
            margin = self.options.margin / 100
            rows.append(metric_row(name, base, new, self.bounds[name], margin, name in self.gated))
        return rows


def metrics_of(options: AlternationArguments) -> Mapping[str, tuple[str, float]]:
    """What is measured: of servers, or of engines in processes of ours."""
    return SERVED_METRICS if options.serve else METRICS


def run(options: AlternationArguments, engine: Mapping[str, Any], progress: Progress) -> Record:
    """Measure until the comparison is decided, or no rounds or no time are left.

    Raises ``usage``, ``bad_option`` and ``side_failed``.
    """
    for name in options.metrics:
        if name not in metrics_of(options):
            known = ", ".join(metrics_of(options))
            mode = " --serve" if options.serve else ""
            raise error("usage", reason=f"bench ab{mode} has no metric {name!r}.", hint=f"It has {known}.")
    if options.min_rounds > options.max_rounds:
        reason = f"--min-rounds {options.min_rounds} is more than --max-rounds {options.max_rounds}."
        raise error("usage", reason=reason, hint="Raise the latter.")
    seed = workload.new_seed() if options.seed is None else options.seed
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        engine = _with_pages(options, engine)
        sides = (
            open_side("base", options.base, options.base_set, engine, stack, options.serve),
            open_side("new", options.new, options.new_set, engine, stack, options.serve),
        )
        state = Alternation(options, sides, seed, options.metrics or (SERVED_GATED if options.serve else GATED))
        longest = 0.0
        while len(state.rounds) < options.max_rounds and not (state.bounds and state.decided):
            # The rounds of a time that is over end with a look, too: the last of the plan, only earlier.
            if len(state.rounds) > 1 and time.monotonic() - began + longest > 60 * options.max_minutes:
                state.look()
                break
            started = time.monotonic()
            state.measure_round()
            longest = max(longest, time.monotonic() - started)
            if len(state.rounds) in state.plan.looks:
                state.look()
            progress(len(state.rounds), options.max_rounds, _so_far(state))
    return _record(state, time.monotonic() - began)


def _with_pages(options: AlternationArguments, engine: Mapping[str, Any]) -> dict[str, Any]:
    """``engine`` with a KV cache for eight batches, unless it says how large: the rest of the memory of the machine,
    which both sides would take, changes from round to round.
    """
    if any(name in engine for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization")):
        return dict(engine)
    pages = -(-(options.input_len + options.output_len) // (engine.get("block_size") or 16)) + 1
    return {**engine, "num_gpu_blocks_override": 8 * options.batch_size * pages + 1}


def _so_far(state: Alternation) -> str:
    parts = []
    for name in state.gated:
        logs = [math.log(each[name][1] / each[name][0]) for each in state.rounds if name in each]
        if logs:
            parts.append(f"{name} {100 * math.expm1(fmean(logs)):+.1f} %")
    return ", ".join(parts)


def _record(state: Alternation, seconds: float) -> Record:
    options = state.options
    missing = [name for name in state.gated if name not in state.names()]
    if missing:
        raise error("side_failed", side="One side", reason=f"it does not measure {', '.join(missing)}")
    rows = state.rows()
    metrics: dict[str, Any] = {
        "base": state.sides[0].label,
        "new": state.sides[1].label,
        "margin": options.margin / 100,
        "confidence": options.confidence / 100,
        "rounds": len(state.rounds),
        "duration": seconds,
        "metrics": rows,
        "counters": [],
        "same_tokens": state.same_tokens,
        "by_round": {name: [each[name] for each in state.rounds] for name in state.names()},
    }
    metrics["verdict"] = verdict_of(metrics)
    warnings = [] if state.same_tokens else ["The two sides generated different tokens from the same prompts."]
    warnings += state.noise_warnings()
    config = {key: value for key, value in asdict(options).items() if key != "seed"}
    config["engines"] = {side.name: dict(side.engine) for side in state.sides}
    where = {**environment("cpu" if "cuda" not in str(state.facts) else "cuda"), "sides": state.facts}
    return Record("ab", state.seed, config, metrics, where, tuple(warnings))
