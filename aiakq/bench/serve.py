"""``bench serve``: the performance of a running server over HTTP, measured by the client.

Every request is timed as a user sees it: time to first token (TTFT), time per output token after the first (TPOT),
gaps between tokens (ITL) and end-to-end latency (E2EL). Keys follow vLLM's benchmark, so that comparison scripts work.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from aiakq.arguments.bench import ServeArguments
from aiakq.bench import client as http
from aiakq.bench import workload
from aiakq.bench.client import Timing
from aiakq.bench.summary import milliseconds, rate
from aiakq.bench.workload import Request
from aiakq.errors import error
from aiakq.records import Record, environment

#: Called with finished requests, all requests and failed requests.
Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServeArguments):
    """What to send, and how fast.

    base_url         of the server; ``host`` and ``port`` are not used.
    model            name on the server; None takes the first it lists.
    num_prompts      None: 100 random ones, or every prompt of the dataset once.
    request_rate     requests per second; infinity sends all at once.
    burstiness       shape of the gamma-distributed gaps; 1 is a Poisson process.
    ignore_eos       None: yes for random prompts, no for a dataset.
    goodput          metric (ttft, tpot, e2el) -> milliseconds a good request stays within.
    seed             None: a new one each time.
    """

    base_url: str


def run(options: ServeOptions, progress: Progress, facts: Mapping[str, str] | None = None) -> Record:
    """Send the workload and measure it. Requests that fail are counted in the record, with the first reason.

    facts  what the server reported when it started, if this process started it; kept in the record.
    Raises ``server_unreachable``, ``unknown_model``, ``bench_failed`` if a warm-up request fails, and what
    ``workload`` raises for a dataset.
    """
    return asyncio.run(_run(options, progress, facts))


async def _run(options: ServeOptions, progress: Progress, facts: Mapping[str, str] | None) -> Record:
    seed = workload.new_seed() if options.seed is None else options.seed
    rng = random.Random(seed)
    source = workload.open_workload(options, rng)
    async with http.open_client(options.base_url, options.api_key, options.timeout_s) as client:
        model = await http.served_model(client, options.model)
        vocab_size = options.vocab_size or model.vocab_size
        requests = source.requests(vocab_size)
        ignore_eos = source.ignore_eos if options.ignore_eos is None else options.ignore_eos
        for number in range(options.num_warmups):
            warm_up = requests[0]
            if source.fresh_prompts:  # a prompt that leaves no prefix of the others in the cache
                size = workload.known_size(vocab_size)
                warm_up = workload.random_requests(1, options.input_len, options.output_len, size, rng)[0]
            await _warm_up(client, model.name, warm_up, ignore_eos, number, options.num_warmups)
        before = await http.prefix_counters(client)
        started = time.perf_counter()
        timings = await _send_all(client, model.name, requests, options, ignore_eos, rng, progress)
        duration = max(timing.ended for timing in timings) - started
        after = await http.prefix_counters(client)

    queries, hits = (None if x is None or y is None else y - x for x, y in zip(before, after, strict=True))
    share = workload.hit_rate(queries, hits)
    warnings = workload.cache_warning(source.fresh_prompts, share) + source.warnings()
    name = workload.workload_name(options)
    metrics = measure(timings, duration, options.goodput)
    metrics["prefix_cache"] = {"queries": queries, "hits": hits, "hit_rate": share}
    if options.save_detailed:
        metrics["detailed"] = _detailed(timings, started)
    config = {
        **{key: value for key, value in asdict(options).items() if key not in ("api_key", "seed", "host", "port")},
        "workload": name,
        "dataset": name if options.dataset is None else str(options.dataset),
        "model": model.name,
        "num_prompts": len(requests),
        "vocab_size": vocab_size,
        "ignore_eos": ignore_eos,
        "server_version": model.server_version,
    }
    where = {**environment(), "engine": None if facts is None else dict(facts)}
    return Record("serve", seed, config, metrics, where, tuple(warnings))


async def _warm_up(
    client: httpx.AsyncClient, model: str, request: Request, ignore_eos: bool, number: int, total: int
) -> None:
    """Send a request that is not measured. Raises ``bench_failed`` if it fails."""
    timing = Timing(scheduled=time.perf_counter())
    await http.complete(client, model, request, ignore_eos, timing)
    if timing.error:
        raise error("bench_failed", failed=number + 1, total=total, reason=timing.error.rstrip("."))


async def _send_all(
    client: httpx.AsyncClient,
    model: str,
    requests: Sequence[Request],
    options: ServeOptions,
    ignore_eos: bool,
    rng: random.Random,
    progress: Progress,
) -> list[Timing]:
    """Send every request at its time and wait for all. The timings come back in the order of ``requests``."""
    free = asyncio.Semaphore(options.max_concurrency or len(requests))
    start = time.perf_counter()
    offsets = workload.arrival_times(len(requests), options.request_rate, options.burstiness, rng)
    timings = [Timing(scheduled=start + offset) for offset in offsets]
    done = failed = 0
    progress(0, len(requests), 0)

    async def send(request: Request, timing: Timing) -> None:
        nonlocal done, failed
        # Sleeping until an absolute time: the delays of this loop do not add up and lower the rate.
        await asyncio.sleep(max(0.0, timing.scheduled - time.perf_counter()))
        async with free:
            await http.complete(client, model, request, ignore_eos, timing)
        done += 1
        failed += timing.error is not None
        progress(done, len(requests), failed)

    async with asyncio.TaskGroup() as tasks:
        for request, timing in zip(requests, timings, strict=True):
            tasks.create_task(send(request, timing))
    return timings


def measure(timings: Sequence[Timing], duration: float, goodput: Mapping[str, float]) -> dict[str, Any]:
    """The metrics of a run of ``duration`` seconds; the same keys for every run, None where nothing was measured.

    ``queue_ms`` is the wait between a request's scheduled time and its sending (--max-concurrency, a slow client).
    """
    good = [timing for timing in timings if timing.error is None]
    inputs = sum(timing.input_tokens for timing in good)
    outputs = sum(timing.output_tokens for timing in good)
    metrics: dict[str, Any] = {
        "completed": len(good),
        "failed": len(timings) - len(good),
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": rate(len(good), duration),
        "request_goodput": rate(sum(_within(timing, goodput) for timing in good), duration) if goodput else None,
        "output_throughput": rate(outputs, duration),
        "total_token_throughput": rate(inputs + outputs, duration),
        "max_output_tokens_per_s": _peak_output_tokens(good),
        "max_concurrent_requests": _peak_concurrency(timings),
    }
    metrics.update(milliseconds("ttft", [timing.ttft for timing in good]))
    metrics.update(milliseconds("tpot", [timing.tpot for timing in good if timing.tpot is not None]))
    metrics.update(milliseconds("itl", [gap for timing in good for gap in timing.itl]))
    metrics.update(milliseconds("e2el", [timing.e2el for timing in good]))
    metrics.update(milliseconds("queue", [timing.sent - timing.scheduled for timing in timings if timing.sent]))
    metrics["first_error"] = next((timing.error for timing in timings if timing.error), None)
    return metrics


def template() -> dict[str, Any]:
    """The document of a run without requests: every key that a gate may name."""
    metrics = measure([], 0.0, {})
    metrics["prefix_cache"] = {"queries": None, "hits": None, "hit_rate": None}
    return Record("serve", 0, {}, metrics, {}).document()


def _within(timing: Timing, goodput: Mapping[str, float]) -> bool:
    measured = {"ttft": timing.ttft, "tpot": timing.tpot or 0.0, "e2el": timing.e2el}
    return all(1000 * measured[name] <= limit for name, limit in goodput.items())


def _peak_output_tokens(timings: Sequence[Timing]) -> float | None:
    """The most output tokens that arrived within one second of the run."""
    if not timings:
        return None
    start = min(timing.sent for timing in timings)
    seconds: dict[int, float] = {}
    for timing in timings:
        # A chunk may hold several tokens; the tokens of a response are spread evenly over its chunks.
        share = timing.output_tokens / len(timing.token_times)
        for moment in timing.token_times:
            second = int(moment - start)
            seconds[second] = seconds.get(second, 0.0) + share
    return max(seconds.values())


def _peak_concurrency(timings: Sequence[Timing]) -> int:
    changes = [(timing.sent, 1) for timing in timings if timing.sent]
    changes += [(timing.ended, -1) for timing in timings if timing.sent]
    peak = current = 0
    for _, change in sorted(changes):
        current += change
        peak = max(peak, current)
    return peak


def _detailed(timings: Sequence[Timing], started: float) -> dict[str, list[Any]]:
    """The timings request by request, in seconds, under the names of vLLM's --save-detailed."""
    return {
        "input_lens": [timing.input_tokens for timing in timings],
        "output_lens": [timing.output_tokens for timing in timings],
        "start_times": [timing.sent - started for timing in timings],
        "queue_times": [timing.sent - timing.scheduled for timing in timings],
        "ttfts": [timing.ttft if timing.token_times else None for timing in timings],
        "itls": [timing.itl for timing in timings],
        "latencies": [timing.e2el if timing.token_times else None for timing in timings],
        "generated_texts": [timing.text for timing in timings],
        "errors": [timing.error or "" for timing in timings],
    }
