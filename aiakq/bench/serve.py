"""``bench serve``: the performance of a running server over HTTP, measured by the client.

Every request is timed as a user sees it: time to first token (TTFT), time per output token after the first (TPOT),
gaps between tokens (ITL) and end-to-end latency (E2EL). Keys follow vLLM's benchmark, so that comparison scripts work.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx

from aiakq.arguments.bench import PRESETS, ServeArguments
from aiakq.bench import client as http
from aiakq.bench import workload
from aiakq.bench.arrivals import Ramp, arrival_times
from aiakq.bench.client import Endpoint, ServedModel, Timing
from aiakq.bench.client_processes import Share, send_in_processes
from aiakq.bench.drafts import draft_metrics
from aiakq.bench.load import ClientLoad, Progress, send_at, send_for, watched
from aiakq.bench.local_tokenizer import LocalTokenizer, open_tokenizer
from aiakq.bench.summary import milliseconds, rate, summarize
from aiakq.bench.workload import Request
from aiakq.errors import error
from aiakq.records import Record, environment


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


def limits_of(options: ServeOptions) -> Mapping[str, float]:
    """The limits of a good request: those of ``goodput``, or of the preset."""
    return options.goodput or (PRESETS[options.preset] if options.preset else {})


async def _run(options: ServeOptions, progress: Progress, facts: Mapping[str, str] | None) -> Record:
    seed = workload.new_seed() if options.seed is None else options.seed
    rng = random.Random(seed)
    _check(options)
    source = workload.open_workload(options, rng)
    async with http.open_client(options.base_url, options.api_key, options.timeout_s) as client:
        model = await http.served_model(client, options.model)
        tokenizer = open_tokenizer(options.tokenizer, model.root)
        vocab_size = options.vocab_size or model.vocab_size
        ignore_eos = source.ignore_eos if options.ignore_eos is None else options.ignore_eos
        endpoint = Endpoint(options.endpoint, model.name, ignore_eos, options.extra_body)
        first = _as_text(source.requests(vocab_size), endpoint, tokenizer)
        for number in range(options.num_warmups):
            warm_up = first[0]
            if source.fresh_prompts:  # a prompt that leaves no prefix of the others in the cache
                size = workload.known_size(vocab_size)
                fresh = workload.random_requests(1, options.input_len, options.output_len, size, rng)
                warm_up = _as_text(fresh, endpoint, tokenizer)[0]
            await _warm_up(client, endpoint, warm_up, number, options.num_warmups)
        before = await http.server_counters(client)

        def endless() -> Iterator[Request]:
            yield from first
            while True:
                yield from _as_text(source.requests(vocab_size), endpoint, tokenizer)

        async with watched() as load:
            timings = await _send(client, endpoint, endless(), len(first), options, rng, progress, load)
        after = await http.server_counters(client)
    cache, drafts = _server_use(before, after)
    warnings = workload.cache_warning(source.fresh_prompts, cache["hit_rate"]) + source.warnings()
    if len(timings) > len(first) and not source.fresh_prompts:
        warnings.append(workload.REPEATED)
    tokens_from = _count_tokens(timings, tokenizer)
    warnings += load.warnings() + _token_warnings(tokens_from)
    metrics = _metrics(timings, load.started, options)
    if options.request_rate == math.inf and options.ramp_up_strategy is None and first[0].at is None:
        metrics |= milliseconds("scheduled_e2el", [])  # nothing was scheduled: as fast as answers come
    metrics |= {"prefix_cache": cache, "speculation": drafts, "tokens_from": tokens_from}
    metrics |= {"client_lag_ms": load.summary(), "client_cpu_share": load.cpu_share}
    config = _config(options, len(timings), vocab_size, ignore_eos, model)
    metrics |= _vllm_settings(config, endpoint, options.tokenizer or model.root)
    where = {**environment(), "engine": None if facts is None else dict(facts)}
    return Record("serve", seed, config, metrics, where, tuple(warnings))


def _server_use(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The use of the prefix cache and of draft tokens between two readings of the server's counters."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    queries, hits = (
        grown.get(name) if name in before else None
        for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")
    )
    drafts, tokens, accepted = (
        grown.get(f"spec_decode_num_{name}_total", 0.0) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    by_position: list[float] = []
    while (name := f"accepted.{len(by_position)}") in grown:
        by_position.append(grown[name])
    cache = {"queries": queries, "hits": hits, "hit_rate": workload.hit_rate(queries, hits)}
    return cache, draft_metrics(drafts, tokens, accepted, by_position)


async def _warm_up(client: httpx.AsyncClient, endpoint: Endpoint, request: Request, number: int, total: int) -> None:
    """Send a request that is not measured. Raises ``bench_failed`` if it fails."""
    timing = Timing(scheduled=time.perf_counter())
    await http.complete(client, endpoint, request, timing)
    if timing.error:
        raise error("bench_failed", failed=number + 1, total=total, reason=timing.error.rstrip("."))


def measure(
    timings: Sequence[Timing],
    duration: float,
    goodput: Mapping[str, float],
    window: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """The metrics of a run of ``duration`` seconds; the same keys for every run, None where nothing was measured.

    ``queue_ms`` is the wait between a request's scheduled time and its sending (--max-concurrency, a slow client).

    window  first and last moment that are measured: requests that were due in it, and tokens that arrived in it.
    """
    every = timings
    if window is not None:
        timings = [timing for timing in timings if window[0] <= timing.scheduled < window[1]]
    good = [timing for timing in timings if timing.error is None]
    inputs = sum(timing.input_tokens for timing in good)
    outputs: float = sum(timing.output_tokens for timing in good)
    if window is not None:
        outputs = sum(_tokens_within(timing, window) for timing in every if timing.error is None)
    within = sum(_within(timing, goodput) for timing in good) if goodput else None
    metrics: dict[str, Any] = {
        "completed": len(good),
        "failed": len(timings) - len(good),
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": rate(len(good), duration),
        "request_goodput": None if within is None else rate(within, duration),
        "goodput_share": None if within is None or not timings else within / len(timings),
        "output_throughput": rate(outputs, duration),
        "total_token_throughput": rate(inputs + outputs, duration),
        "max_output_tokens_per_s": _peak_output_tokens(good),
        "max_concurrent_requests": _peak_concurrency(timings),
    }
    metrics.update(milliseconds("ttft", [timing.ttft for timing in good]))
    metrics.update(milliseconds("tpot", [timing.tpot for timing in good if timing.tpot is not None]))
    metrics.update(milliseconds("itl", [gap for timing in good for gap in timing.itl]))
    metrics.update(milliseconds("e2el", [timing.e2el for timing in good]))
    metrics.update(milliseconds("scheduled_e2el", [timing.scheduled_e2el for timing in good]))
    metrics.update(milliseconds("queue", [timing.sent - timing.scheduled for timing in timings if timing.sent]))
    metrics["first_error"] = next((timing.error for timing in timings if timing.error), None)
    return metrics


def template() -> dict[str, Any]:
    """The document of a run without requests: every key that a gate may name."""
    metrics = measure([], 0.0, {})
    metrics["prefix_cache"] = {"queries": None, "hits": None, "hit_rate": None}
    metrics["speculation"] = draft_metrics()
    metrics |= {"client_lag_ms": summarize([]), "client_cpu_share": None}
    return Record("serve", 0, {}, metrics, {}).document()


def _within(timing: Timing, goodput: Mapping[str, float]) -> bool:
    measured = {"ttft": timing.ttft, "tpot": timing.tpot or 0.0, "e2el": timing.e2el}
    return all(1000 * measured[name] <= limit for name, limit in goodput.items())


def _tokens_within(timing: Timing, window: tuple[float, float]) -> float:
    """The tokens of an answer that arrived in the window; chunks count the same."""
    inside = sum(window[0] <= moment < window[1] for moment in timing.token_times)
    return timing.output_tokens * inside / len(timing.token_times)


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


# --- how requests are sent --------------------------------------------------------------------------------------------


def _check(options: ServeOptions) -> None:
    """Raise ``usage`` and ``option_conflict`` for options that do not fit together, before anything is sent."""
    ramp = (options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)
    if any(each is not None for each in ramp) and None in ramp:
        raise error(
            "usage",
            reason="A ramp needs a strategy and two rates.",
            hint="Example: --ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 20",
        )
    if options.preset is not None and options.goodput:
        reason = "both set limits"
        raise error("option_conflict", option="--preset", other="--goodput", reason=reason, hint="Give one.")
    if options.duration_s is None:
        return
    if options.num_prompts is not None:
        reason = "both say when to end"
        raise error("option_conflict", option="--duration", other="--num-prompts", reason=reason, hint="Give one.")
    if options.request_rate == math.inf and None in ramp and options.max_concurrency is None:
        raise error(
            "usage",
            reason="--duration at a rate of inf has no end of requests to send at once.",
            hint="Give --request-rate, or --max-concurrency for a number that is kept in flight.",
        )
    if options.request_rate == math.inf and None in ramp and options.client_processes > 1:
        reason = "a number kept in flight for a time is sent by one process"
        hint = "Give --num-prompts or --request-rate."
        raise error("option_conflict", option="--client-processes", other="--duration", reason=reason, hint=hint)
    if workload.workload_name(options) in ("conversation", "trace"):
        reason = "conversations and traces have an end of their own"
        raise error(
            "option_conflict", option="--duration", other="--workload", reason=reason, hint="Give --num-prompts."
        )
    if options.warmup_s + options.cooldown_s >= options.duration_s:
        raise error("usage", reason="Nothing of the load is measured.", hint="Raise --duration.")


async def _send(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    requests: Iterator[Request],
    count: int,
    options: ServeOptions,
    rng: random.Random,
    progress: Progress,
    load: ClientLoad,
) -> list[Timing]:
    """Send ``count`` requests, or for the duration, at the rate of the options or the times of a trace."""
    seconds, concurrency = options.duration_s, options.max_concurrency
    ramp, per_second = None, options.request_rate
    if options.ramp_up_strategy is not None and options.ramp_up_start_rps and options.ramp_up_end_rps:
        ramp = Ramp(options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)
        per_second = (options.ramp_up_start_rps + options.ramp_up_end_rps) / 2
    if seconds is not None and per_second == math.inf:
        assert concurrency is not None
        return await send_for(client, endpoint, requests, seconds, concurrency, progress)
    if seconds is not None:
        count = max(1, round(per_second * seconds))
    chosen = [next(requests) for _ in range(count)]
    if chosen[0].at is not None and per_second == math.inf:
        offsets = [request.at or 0.0 for request in chosen]
    else:
        starting = [index for index, request in enumerate(chosen) if request.follows is None]
        times = arrival_times(len(starting), per_second, options.burstiness, rng, ramp)
        offsets = [0.0] * count
        for index, offset in zip(starting, times, strict=True):
            offsets[index] = offset
    if options.client_processes == 1:
        return await send_at(client, endpoint, chosen, offsets, concurrency, progress)
    server = (options.base_url, options.api_key, options.timeout_s, endpoint)
    whole = Share(*server, chosen, offsets, list(range(count)), concurrency)
    return await send_in_processes(whole, options.client_processes, load, progress)


def _as_text(requests: Sequence[Request], endpoint: Endpoint, tokenizer: LocalTokenizer | None) -> list[Request]:
    """``requests`` for ``endpoint``: chat takes no token ids.

    Raises ``usage`` if no tokenizer can turn them into text.
    """
    if not endpoint.is_chat or all(request.messages or isinstance(request.prompt, str) for request in requests):
        return list(requests)
    if tokenizer is None:
        raise error(
            "usage",
            reason="Chat takes no token ids, and the model's tokenizer is not on this machine.",
            hint="Give --tokenizer DIR, or --dataset FILE.",
        )
    return [_with_text(request, tokenizer) for request in requests]


def _with_text(request: Request, tokenizer: LocalTokenizer) -> Request:
    # Of what follows an answer only the new part is sent: the rest are the messages before it.
    own = request.prompt if request.message is None else request.message
    return replace(request, prompt=tokenizer.text_of(own)) if isinstance(own, list) else request


def _count_tokens(timings: Sequence[Timing], tokenizer: LocalTokenizer | None) -> str:
    """Count the tokens of answers that came without usage. Returns what counted: usage, tokenizer or chunks."""
    uncounted = [timing for timing in timings if timing.error is None and not timing.counted]
    for timing in uncounted:
        timing.output_tokens = len(timing.token_times) if tokenizer is None else tokenizer.count(timing.text)
    if not uncounted:
        return "usage"
    return "chunks" if tokenizer is None else "tokenizer"


def _token_warnings(tokens_from: str) -> list[str]:
    if tokens_from == "usage":
        return []
    if tokens_from == "tokenizer":
        return ["The server sent no usage: output tokens were counted with a tokenizer here, prompt tokens not at all."]
    return ["The server sent no usage: every chunk was counted as one token. Give --tokenizer DIR to count tokens."]


def _is_cut(options: ServeOptions) -> bool:
    return bool(options.warmup_s or options.cooldown_s)


def _window(timings: Sequence[Timing], started: float, options: ServeOptions) -> tuple[float, float]:
    """The first and the last moment that count. Raises ``usage`` if nothing was due between them."""
    if not _is_cut(options):
        return started, max(timing.ended for timing in timings)
    last = max(timing.scheduled for timing in timings) if options.duration_s is None else started + options.duration_s
    window = started + options.warmup_s, last - options.cooldown_s
    if not any(window[0] <= timing.scheduled < window[1] for timing in timings):
        raise error("usage", reason="Nothing of the load is measured.", hint="Send more, or lower --warmup-seconds.")
    return window


def _metrics(timings: Sequence[Timing], started: float, options: ServeOptions) -> dict[str, Any]:
    window = _window(timings, started, options)
    metrics = measure(timings, window[1] - window[0], limits_of(options), window if _is_cut(options) else None)
    if options.save_detailed or options.html is not None:
        metrics["detailed"] = _detailed(timings, started)
    return metrics


def _vllm_settings(config: Mapping[str, Any], endpoint: Endpoint, tokenizer: str | None) -> dict[str, Any]:
    """The settings that vLLM's benchmark writes beside its metrics, which scripts group results by."""
    named = {key: _named(config[key]) for key in ("request_rate", "burstiness")}
    backend = "openai-chat" if endpoint.is_chat else "openai"
    names = {"backend": backend, "model_id": endpoint.model, "tokenizer_id": tokenizer}
    return {**names, "num_prompts": config["num_prompts"], **named, "max_concurrency": config["max_concurrency"]}


def _named(value: float) -> float | str:
    """A number for JSON that keeps infinity, as vLLM writes it."""
    return value if math.isfinite(value) else str(value)


def _config(
    options: ServeOptions, count: int, vocab_size: int | None, ignore_eos: bool, model: ServedModel
) -> dict[str, Any]:
    """The options with the values used."""
    name = workload.workload_name(options)
    return {
        **{key: value for key, value in asdict(options).items() if key not in ("api_key", "seed", "host", "port")},
        "workload": name,
        "dataset": name if options.dataset is None else str(options.dataset),
        "model": model.name,
        "num_prompts": count,
        "vocab_size": vocab_size,
        "ignore_eos": ignore_eos,
        "server_version": model.server_version,
    }
