"""``bench ab``: measure two sides interleaved until the confidence intervals of their ratios allow a verdict.

The unit of measurement is a round: both sides start new processes and then take turns (base, new, new, base, ...) on
the same prompts. A round yields one ratio per metric, computed from the lower quartiles of its turns, which are robust
against other load on the machine. Turns of one process are not independent, because its memory layout can slow it down
by a few percent for its whole lifetime, so confidence intervals are computed over rounds.
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
from aiakq.bench.comparison.compare import ComparedRows, MetricRow, metric_row, verdict_of
from aiakq.bench.comparison.process import SideProcess
from aiakq.bench.comparison.served_side import ServedSide
from aiakq.bench.comparison.sides import Side, fresh_libraries, open_side
from aiakq.bench.comparison.statistics import UNDECIDED, WORSE, Ratio, SequentialPlan
from aiakq.bench.summary import percentile
from aiakq.errors import error
from aiakq.records import Record, environment

#: Metrics of a side without ``--serve``: metric name -> (key in the worker's result, factor to the metric's unit).
METRICS = {
    "prefill_ms": ("prefill_s", 1e3),
    "decode_ms": ("decode_s", 1e3),
    "peak_mb": ("peak_bytes", 1e-6),
    "decode_mean_ms": ("decode_mean_s", 1e3),
}
#: Metrics of a side with ``--serve``, in the same form.
SERVED_METRICS = {
    "ttft_ms": ("ttft_s", 1e3),
    "tpot_ms": ("tpot_s", 1e3),
    "e2el_ms": ("e2el_s", 1e3),
    "peak_mb": ("peak_bytes", 1e-6),
    "cpu_ms": ("cpu_s", 1e3),
}
#: Metrics that are gated by default, without and with ``--serve``.
GATED, SERVED_GATED = ("prefill_ms", "decode_ms", "peak_mb"), ("ttft_ms", "tpot_ms", "peak_mb")
#: Unmeasured turns per side at the start of a round, and the minimum number of measured turns.
WARM_UPS, MIN_TURNS = 2, 4
#: Percentile of a round's turns that is the value of the round.
QUARTILE = 25

#: Progress callback: rounds completed, maximum number of rounds, summary of the estimates so far.
Progress = Callable[[int, int, str], None]
#: The result of one round: metric name -> (value of base, value of new).
Round = dict[str, tuple[float, float]]


@dataclass
class Alternation:
    """The state of a comparison. ``bounds`` holds the intervals of the latest interim analysis."""

    options: AlternationArguments
    sides: tuple[Side, Side]
    seed: int
    gated: tuple[str, ...]
    rounds: list[Round] = field(default_factory=list)
    bounds: dict[str, Ratio] = field(default_factory=dict)
    same_tokens: bool = True
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def plan(self) -> SequentialPlan:
        options = self.options
        return SequentialPlan(options.min_rounds, options.max_rounds, len(self.gated), 1 - options.confidence / 100)

    def measure_round(self) -> None:
        """Start both sides, measure them in turns and append the round. Raises ``side_failed``."""
        number, options = len(self.rounds), self.options
        load = {"batch_size": options.batch_size, "input_len": options.input_len, "output_len": options.output_len}
        order = (0, 1) if number % 2 == 0 else (1, 0)
        turns: tuple[list[dict[str, object]], list[dict[str, object]]] = ([], [])
        with contextlib.ExitStack() as stack:
            workers: dict[int, SideProcess | ServedSide] = {}
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aiakq-ab-")))
            libraries = fresh_libraries(self.sides, folder)
            for side in order:
                arguments = (self.sides[side], load, options.timeout_s, libraries[side])
                workers[side] = ServedSide(*arguments) if options.serve else SideProcess(*arguments)
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
        quartiles: Round = {"load_s": (loaded[0]["load_s"], loaded[1]["load_s"])}
        for name, (key, factor) in metrics_of(self.options).items():
            sides = [sorted(factor * turn[key] for turn in each if turn[key] is not None) for each in turns]
            if all(sides) and sides[0][0] > 0 and sides[1][0] > 0:
                quartiles[name] = (percentile(sides[0], QUARTILE), percentile(sides[1], QUARTILE))
        self.same_tokens &= all(one["digest"] == two["digest"] for one, two in zip(*turns, strict=True))
        self.rounds.append(quartiles)

    def analyze(self) -> None:
        """Compute the confidence interval of every metric from the rounds so far (an interim analysis)."""
        for name in self.metric_names():
            # Only gated metrics get a verdict, so only their intervals are corrected for multiple comparisons.
            alpha = self.plan.alpha_per_analysis if name in self.gated else self.plan.alpha
            log_ratios = [math.log(each[name][1] / each[name][0]) for each in self.rounds]
            self.bounds[name] = statistics.paired_ratio(log_ratios, alpha)

    def metric_names(self) -> list[str]:
        """Return the metrics that every round has measured."""
        return [name for name in self.rounds[0] if all(name in each for each in self.rounds)]

    def verdicts(self) -> dict[str, str]:
        """Return the verdict on every gated metric as of the latest interim analysis."""
        margin = self.options.margin / 100
        return {name: self.bounds[name].verdict(margin) if name in self.bounds else UNDECIDED for name in self.gated}

    @property
    def decided(self) -> bool:
        """Whether no further round is needed: a gated metric is worse, or none is undecided."""
        verdicts = self.verdicts().values()
        return WORSE in verdicts or UNDECIDED not in verdicts

    def noise_warnings(self) -> list[str]:
        """Return a warning for every undecided metric whose interval is wider than the margin."""
        margin, warnings = math.log1p(self.options.margin / 100), []
        for name, verdict in self.verdicts().items():
            bound = self.bounds.get(name)
            if verdict != UNDECIDED or bound is None or bound.high is None:
                continue
            half = math.log(bound.high / bound.value)
            if half > margin:
                # The width falls with the square root of the number of rounds.
                rounds = math.ceil(len(self.rounds) * (half / margin) ** 2)
                warnings.append(
                    f"The interval of {name} is ±{100 * math.expm1(half):.1f} % after {len(self.rounds)} rounds, wider "
                    f"than the margin of {self.options.margin:g} %: at this noise a verdict takes about {rounds} "
                    "rounds. Use a quieter machine, raise --max-rounds and --max-minutes, or widen --margin."
                )
        return warnings

    def rows(self) -> list[MetricRow]:
        """Return the rows of the JSON report: geometric means over rounds, ratios with intervals, verdicts."""
        rows = []
        for name in self.metric_names():
            base, new = (math.exp(fmean(math.log(each[name][side]) for each in self.rounds)) for side in (0, 1))
            margin = self.options.margin / 100
            rows.append(metric_row(name, base, new, self.bounds[name], margin, name in self.gated))
        return rows


def metrics_of(options: AlternationArguments) -> Mapping[str, tuple[str, float]]:
    """Return the metrics of servers (``--serve``) or of engines in worker processes."""
    return SERVED_METRICS if options.serve else METRICS


def run(options: AlternationArguments, engine: Mapping[str, Any], progress: Progress) -> Record:
    """Measure rounds until the comparison is decided or ``max_rounds`` or ``max_minutes`` is reached.

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
        engine = _with_fixed_cache_size(options, engine)
        sides = (
            open_side("base", options.base, options.base_set, engine, stack, options.serve),
            open_side("new", options.new, options.new_set, engine, stack, options.serve),
        )
        state = Alternation(options, sides, seed, options.metrics or (SERVED_GATED if options.serve else GATED))
        longest = 0.0
        while len(state.rounds) < options.max_rounds and not (state.bounds and state.decided):
            # Running out of time moves the plan's final analysis forward.
            if len(state.rounds) > 1 and time.monotonic() - began + longest > 60 * options.max_minutes:
                state.analyze()
                break
            started = time.monotonic()
            state.measure_round()
            longest = max(longest, time.monotonic() - started)
            if len(state.rounds) in state.plan.analyses:
                state.analyze()
            progress(len(state.rounds), options.max_rounds, _progress_text(state))
    return _record(state, time.monotonic() - began)


def _with_fixed_cache_size(options: AlternationArguments, engine: Mapping[str, Any]) -> dict[str, object]:
    """Return ``engine`` with a KV cache for eight batches unless it sets a size itself.

    By default the cache takes a fraction of the free memory, which differs from round to round.
    """
    if any(name in engine for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization")):
        return dict(engine)
    pages = -(-(options.input_len + options.output_len) // (engine.get("block_size") or 16)) + 1
    return {**engine, "num_gpu_blocks_override": 8 * options.batch_size * pages + 1}


def _progress_text(state: Alternation) -> str:
    parts = []
    for name in state.gated:
        logs = [math.log(each[name][1] / each[name][0]) for each in state.rounds if name in each]
        if logs:
            parts.append(f"{name} {100 * math.expm1(fmean(logs)):+.1f} %")
    return ", ".join(parts)


def _record(state: Alternation, seconds: float) -> Record:
    options = state.options
    missing = [name for name in state.gated if name not in state.metric_names()]
    if missing:
        raise error("side_failed", side="One side", reason=f"it does not measure {', '.join(missing)}")
    compared: ComparedRows = {"metrics": state.rows(), "counters": []}
    metrics: dict[str, object] = {
        "base": state.sides[0].label,
        "new": state.sides[1].label,
        "margin": options.margin / 100,
        "confidence": options.confidence / 100,
        "rounds": len(state.rounds),
        "duration": seconds,
        **compared,
        "same_tokens": state.same_tokens,
        "by_round": {name: [each[name] for each in state.rounds] for name in state.metric_names()},
    }
    metrics["verdict"] = verdict_of(compared)
    warnings = [] if state.same_tokens else ["The two sides generated different tokens from the same prompts."]
    warnings += state.noise_warnings()
    config = {key: value for key, value in asdict(options).items() if key != "seed"}
    config["engines"] = {side.name: dict(side.engine) for side in state.sides}
    where = {**environment("cpu" if "cuda" not in str(state.facts) else "cuda"), "sides": state.facts}
    return Record("ab", state.seed, config, metrics, where, tuple(warnings))
