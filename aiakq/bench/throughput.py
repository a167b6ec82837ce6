"""``bench throughput``: the throughput of many requests submitted at once."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aiakq.arguments.bench import ThroughputArguments
from aiakq.bench import workload
from aiakq.bench.drafts import add_speedup, draft_metrics
from aiakq.bench.latency import token_times
from aiakq.bench.offline import MeasuredEngine, Progress
from aiakq.bench.summary import milliseconds, rate
from aiakq.records import Record
from aiakq.runtime.protocol.request_output import RequestOutput


@dataclass(frozen=True)
class ThroughputOptions(ThroughputArguments):
    """``engine`` holds the engine arguments."""

    engine: Mapping[str, Any] = field(default_factory=dict)


def run(options: ThroughputOptions, progress: Progress) -> Record:
    """Run all requests at once and time it, after ``warmups`` single requests that are not measured.

    To compare with no draft tokens, they run ``compare_rounds`` times with and without in turns; the metrics are those
    of the median run with draft tokens, and counters are sums.
    """
    seed = workload.new_seed() if options.seed is None else options.seed
    rng = random.Random(seed)
    source = workload.open_workload(options, rng)
    progress("load", 0, 1)
    engine = MeasuredEngine(options.engine)
    if options.compare_speculation:
        engine.check_speculates()
    requests = source.requests(engine.vocab_size)
    ignore_eos = source.ignore_eos if options.ignore_eos is None else options.ignore_eos
    for number in range(options.warmups):
        progress("warm-up", number, options.warmups)
        engine.generate(
            workload.random_requests(1, options.input_len, min(options.output_len, 16), engine.vocab_size, rng), True
        )
    engine.reset_counts()
    runs: list[tuple[float, list[RequestOutput]]] = []
    without: list[float] = []
    rounds = options.compare_rounds if options.compare_speculation else 1
    for number in range(rounds):
        progress("measure", number, rounds)
        if options.compare_speculation:
            seconds, outputs, plain = engine.compare_drafts(requests, ignore_eos, number)
            without.append(plain)
        else:
            seconds, outputs = engine.generate(requests, ignore_eos)
        runs.append((seconds, outputs))
    progress("measure", rounds, rounds)
    duration, outputs = sorted(runs, key=lambda run: run[0])[(rounds - 1) // 2]
    metrics = measure(duration, outputs)
    metrics["load_s"] = engine.load_s
    metrics["prefix_cache"] = engine.cache_use()
    metrics["speculation"] = engine.draft_use()
    if options.compare_speculation:
        with_drafts = [seconds for seconds, _ in runs]
        add_speedup(metrics["speculation"], with_drafts, without, metrics["total_output_tokens"])
    warnings = workload.cache_warning(source.fresh_prompts, metrics["prefix_cache"]["hit_rate"]) + source.warnings()
    name = workload.workload_name(options)
    config = {
        **{key: value for key, value in asdict(options).items() if key != "seed"},
        "workload": name,
        "dataset": name if options.dataset is None else str(options.dataset),
        "num_prompts": len(requests),
        "ignore_eos": ignore_eos,
    }
    return Record("throughput", seed, config, metrics, engine.environment(), tuple(warnings))


def measure(duration: float, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The metrics of requests that took ``duration`` seconds together; None where nothing was measured.

    ``elapsed_time``, ``num_requests``, ``total_num_tokens``, ``requests_per_second`` and ``tokens_per_second`` repeat
    other keys under the names of vLLM's offline benchmark.
    """
    inputs = sum(len(output.prompt_token_ids) for output in outputs)
    produced = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    good = sum(output.error is None for output in outputs)
    metrics: dict[str, object] = {
        "completed": good,
        "failed": len(outputs) - good,
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": produced,
        "request_throughput": rate(good, duration),
        "output_throughput": rate(produced, duration),
        "total_token_throughput": rate(inputs + produced, duration),
        "elapsed_time": duration,
        "num_requests": len(outputs),
        "total_num_tokens": inputs + produced,
        "requests_per_second": rate(good, duration),
        "tokens_per_second": rate(inputs + produced, duration),
    }
    metrics["first_error"] = next((output.error for output in outputs if output.error), None)
    ttft, tpot = token_times(outputs)
    metrics.update(milliseconds("ttft", ttft))
    metrics.update(milliseconds("tpot", tpot))
    return metrics


def template() -> dict[str, Any]:
    """The document of a run without requests: every key that a gate may name."""
    metrics = measure(0.0, [])
    metrics.update(load_s=None, prefix_cache={"queries": None, "hits": None, "hit_rate": None})
    metrics["speculation"] = draft_metrics()
    return Record("throughput", 0, {}, metrics, {}).document()
