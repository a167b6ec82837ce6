"""``bench latency``: the time that one batch of equal requests takes from prompt to last token."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aiakq.arguments.bench import LatencyArguments
from aiakq.bench import workload
from aiakq.bench.drafts import add_speedup, draft_metrics
from aiakq.bench.offline import MeasuredEngine, Progress
from aiakq.bench.summary import milliseconds, rate, summarize
from aiakq.records import Record
from aiakq.runtime.protocol.request_output import RequestOutput


@dataclass(frozen=True)
class LatencyOptions(LatencyArguments):
    """``engine`` holds the engine arguments. ``seed`` None: a new one each time."""

    engine: Mapping[str, Any] = field(default_factory=dict)


def run(options: LatencyOptions, progress: Progress) -> Record:
    """Time ``iterations`` batches after ``warmups`` that are not measured.

    Every batch has new random prompts: repeated ones would hit the prefix cache. To compare with no draft tokens, each
    batch also runs without, before or after in turns.
    """
    seed = workload.new_seed() if options.seed is None else options.seed
    rng = random.Random(seed)
    progress("load", 0, 1)
    engine = MeasuredEngine(options.engine)

    if options.compare_speculation:
        engine.check_speculates()
    without: list[float] = []

    def batch(number: int, compares: bool = False) -> tuple[float, list[RequestOutput]]:
        requests = workload.random_requests(
            options.batch_size, options.input_len, options.output_len, engine.vocab_size, rng
        )
        if not compares:
            return engine.generate(requests, ignore_eos=True)
        seconds, answers, plain = engine.compare_drafts(requests, True, number)
        without.append(plain)
        return seconds, answers

    for number in range(options.warmups):
        progress("warm-up", number, options.warmups)
        batch(number)
    engine.reset_counts()
    durations: list[float] = []
    outputs: list[RequestOutput] = []
    for number in range(options.iterations):
        progress("measure", number, options.iterations)
        seconds, answers = batch(number, options.compare_speculation)
        durations.append(seconds)
        outputs += answers
    progress("measure", options.iterations, options.iterations)
    metrics = measure(durations, outputs)
    metrics["load_s"] = engine.load_s
    metrics["prefix_cache"] = engine.cache_use()
    metrics["speculation"] = engine.draft_use()
    if options.compare_speculation:
        add_speedup(metrics["speculation"], durations, without, options.batch_size * options.output_len)
    notes = workload.cache_warning(True, metrics["prefix_cache"]["hit_rate"])
    config = {key: value for key, value in asdict(options).items() if key != "seed"}
    return Record("latency", seed, config, metrics, engine.environment(), tuple(notes))


def measure(durations: Sequence[float], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The metrics of batches that took ``durations`` seconds; None where nothing was measured.

    ``avg_latency``, ``latencies`` and ``percentiles`` are in seconds, as vLLM writes them; the rest in milliseconds.
    """
    summary = summarize(durations)
    produced = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    metrics: dict[str, object] = {
        "avg_latency": summary["mean"],
        "latencies": list(durations),
        "percentiles": {name[1:]: value for name, value in summary.items() if name.startswith("p")},
        "output_throughput": rate(produced, sum(durations)),
    }
    metrics.update(milliseconds("latency", durations))
    ttft, tpot = token_times(outputs)
    metrics.update(milliseconds("ttft", ttft))
    metrics.update(milliseconds("tpot", tpot))
    return metrics


def token_times(outputs: Sequence[RequestOutput]) -> tuple[list[float], list[float]]:
    """Seconds to the first token, and per output token after it, of every output that has times."""
    ttft, tpot = [], []
    for output in outputs:
        times = output.metrics
        if times is None or times.first_token_time is None or times.last_token_time is None:
            continue
        ttft.append(times.first_token_time - times.arrival_time)
        later = len(output.outputs[0].token_ids) - 1
        if later > 0:
            tpot.append((times.last_token_time - times.first_token_time) / later)
    return ttft, tpot


def unmeasured(options: LatencyArguments) -> dict[str, str]:
    """Keys of the template that a run with these options leaves empty, and why."""
    reason = "answers have one token (--output-len)"
    return dict.fromkeys(milliseconds("tpot", []), reason) if options.output_len == 1 else {}


def template() -> dict[str, Any]:
    """The document of a run without batches: every key that a gate may name."""
    metrics = measure([], [])
    metrics.update(load_s=None, prefix_cache={"queries": None, "hits": None, "hit_rate": None})
    metrics["speculation"] = draft_metrics()
    return Record("latency", 0, {}, metrics, {}).document()
