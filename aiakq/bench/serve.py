"""``bench serve``: the performance of a running server over HTTP, measured by the client.

Every request is timed as a user sees it: time to first token (TTFT), time per output token after the first (TPOT),
gaps between tokens (ITL) and end-to-end latency (E2EL). Keys follow vLLM's benchmark, so that comparison scripts work.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx

from aiakq.arguments.bench import PRESETS, ServeArguments
from aiakq.bench import client as http
from aiakq.bench import workload
from aiakq.bench.arrivals import Ramp, arrival_times
from aiakq.bench.client import Endpoint, ServedModel, Timing
from aiakq.bench.client_processes import ClosedLoop, Share, send_in_processes
from aiakq.bench.drafts import draft_metrics
from aiakq.bench.load import ClientLoad, Progress, send_at, send_for, watched
from aiakq.bench.local_tokenizer import LocalTokenizer, open_tokenizer
from aiakq.bench.request_metrics import LIMITED, detailed, measure
from aiakq.bench.request_source import RequestSource
from aiakq.bench.stopping import StopRule
from aiakq.bench.summary import milliseconds, summarize
from aiakq.bench.workload import Request, Workload
from aiakq.errors import error
from aiakq.records import Record, environment, load_average


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
    check(options)
    made = workload.open_workload(options, rng)
    load_before = load_average()
    async with http.open_client(options.base_url, options.api_key, options.timeout_s) as client:
        model = await http.served_model(client, options.model)
        server = await http.server_facts(client)
        source = await _source(client, options, made, model)
        first = source.batch()
        await _warm_up(client, source, first[0], options, rng)
        before = await http.server_counters(client)
        rule = StopRule(options.max_errors, options.stop_on_overload)
        async with watched() as load:
            every = await _send(client, _Load(options, source, first, rng, seed, model, rule), progress, load)
        after = await http.server_counters(client)
    timings = [timing for timing in every if timing.sent]
    cache, drafts = _server_use(before, after)
    warnings = workload.cache_warning(made.fresh_prompts, cache["hit_rate"]) + made.warnings()
    if len(timings) > len(first) and not made.fresh_prompts:
        warnings.append(workload.REPEATED)
    tokens_from = _count_tokens(timings, source.tokenizer)
    warnings += load.warnings() + _token_warnings(tokens_from) + _connection_warnings(timings)
    if rule.reason is not None:
        warnings.append(f"The load ended early: {rule.reason}.")
    metrics = _metrics(timings, load.started, options, stopped=rule.reason is not None)
    if not is_scheduled(options) and first[0].at is None:
        metrics |= milliseconds("scheduled_e2el", [])  # nothing was scheduled: as fast as answers come
    metrics |= {"prefix_cache": cache, "speculation": drafts, "tokens_from": tokens_from, "stopped": rule.reason}
    metrics |= {"not_sent": len(every) - len(timings), "client_cpu_share": load.cpu_share}
    metrics["client_lag_ms"] = load.summary()
    config = _config(options, len(every), source, model)
    metrics |= _vllm_settings(config, source.endpoint, options.tokenizer or model.root)
    where = {**environment(), "engine": None if facts is None else dict(facts), "server": server}
    where["load_average"] = [load_before, load_average()]
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


async def _source(
    client: httpx.AsyncClient, options: ServeOptions, made: Workload, model: ServedModel
) -> RequestSource:
    """Where requests come from. Raises ``unknown_model`` for an adapter that the server does not have."""
    for name in options.adapters:
        await http.served_model(client, name)
    ignore_eos = made.ignore_eos if options.ignore_eos is None else options.ignore_eos
    endpoint = Endpoint(options.endpoint, model.name, ignore_eos, options.extra_body)
    tokenizer = open_tokenizer(options.tokenizer, model.root)
    return RequestSource(endpoint, made, options.vocab_size or model.vocab_size, tokenizer, options.adapters)


async def _warm_up(
    client: httpx.AsyncClient, source: RequestSource, first: Request, options: ServeOptions, rng: random.Random
) -> None:
    """Send requests that are not measured. Raises ``bench_failed`` if one fails."""
    assert source.workload is not None
    total = options.num_warmups
    for number in range(total):
        request = first
        if source.workload.fresh_prompts:  # a prompt that leaves no prefix of the others in the cache
            size = workload.known_size(source.vocab_size)
            fresh = workload.random_requests(1, options.input_len, options.output_len, size, rng)
            request = source.prepared(fresh)[0]
        timing = Timing(scheduled=time.perf_counter())
        await http.complete(client, source.endpoint, request, timing)
        if timing.error:
            raise error("bench_failed", failed=number + 1, total=total, reason=timing.error.rstrip("."))


def template() -> dict[str, Any]:
    """The document of a run without requests: every key that a gate may name."""
    metrics = measure([], 0.0, {})
    metrics["prefix_cache"] = {"queries": None, "hits": None, "hit_rate": None}
    metrics["speculation"] = draft_metrics()
    metrics |= {"client_lag_ms": summarize([]), "client_cpu_share": None, "not_sent": None}
    return Record("serve", 0, {}, metrics, {}).document()


def unmeasured(options: ServeOptions) -> dict[str, str]:
    """Keys of the template that a run with these options leaves empty, and why."""
    found = {}
    limits = limits_of(options)
    if not limits:
        reason = "no limits are given (--goodput or --preset)"
        found = dict.fromkeys(("request_goodput", "goodput_share", "goodput_shares"), reason)
    found |= {f"goodput_shares.{name}": "it has no limit" for name in LIMITED if limits and name not in limits}
    if not is_scheduled(options) and workload.workload_name(options) not in ("trace", *_other_workloads(options)):
        reason = "requests are sent as fast as answers come (give --request-rate)"
        found |= dict.fromkeys(_keys_of("scheduled_e2el"), reason)
    if options.output_len == 1 and workload.workload_name(options) in ("random", "prefix", "conversation"):
        for name in ("tpot", "itl"):
            found |= dict.fromkeys(_keys_of(name), "answers have one token (--output-len)")
    return found


def _other_workloads(options: ServeOptions) -> tuple[str, ...]:
    """The workload, if it is one that a package adds: its requests may have times."""
    name = workload.workload_name(options)
    return () if name in ("random", "dataset", "prefix", "conversation", "sharegpt") else (name,)


def _keys_of(duration: str) -> list[str]:
    return list(milliseconds(duration, []))


# --- how requests are sent --------------------------------------------------------------------------------------------


def check(options: ServeOptions) -> None:
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
    if options.stop_on_overload and not is_scheduled(options) and workload.workload_name(options) != "trace":
        reason = "requests are sent as fast as answers come, so the server cannot fall behind"
        hint = "Give --request-rate."
        raise error("option_conflict", option="--stop-on-overload", other="a rate of inf", reason=reason, hint=hint)
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
    if workload.workload_name(options) in ("conversation", "trace"):
        reason = "conversations and traces have an end of their own"
        raise error(
            "option_conflict", option="--duration", other="--workload", reason=reason, hint="Give --num-prompts."
        )
    if options.warmup_s + options.cooldown_s >= options.duration_s:
        raise error("usage", reason="Nothing of the load is measured.", hint="Raise --duration.")


def is_scheduled(options: ServeOptions) -> bool:
    """Whether requests are due at times of their own, by a rate or a ramp."""
    return options.request_rate != math.inf or options.ramp_up_strategy is not None


@dataclass(frozen=True)
class _Load:
    """What is sent: ``first``, and whatever ``source`` has after it, as the options say."""

    options: ServeOptions
    source: RequestSource
    first: Sequence[Request]
    rng: random.Random
    seed: int
    model: ServedModel
    rule: StopRule

    def share(self, requests: Sequence[Request], offsets: Sequence[float]) -> Share:
        """All of it, for several processes."""
        options, source = self.options, self.source
        server = (options.base_url, options.api_key, options.timeout_s, source.endpoint)
        indices = list(range(len(requests)))
        load = (list(requests), list(offsets), indices, options.max_concurrency)
        return Share(*server, *load, on_overload=options.stop_on_overload)

    def closed_loop(self, seconds: float) -> Share:
        """A number in flight for so many seconds; every process makes its own prompts if they are to be new."""
        options, source = self.options, self.source
        assert source.workload is not None
        loop = ClosedLoop(seconds, self.seed)
        if source.workload.fresh_prompts:
            folders = (options.tokenizer, self.model.root)
            loop = ClosedLoop(
                seconds, self.seed + 1, replace(options, html=None), source.vocab_size, folders, options.adapters
            )
        return replace(self.share(self.first, []), loop=loop)


async def _send(client: httpx.AsyncClient, load: _Load, progress: Progress, watch: ClientLoad) -> list[Timing]:
    """Send a number of requests, or for the duration, at the rate of the options or the times of a trace."""
    options, source, rule = load.options, load.source, load.rule
    seconds, concurrency, processes = options.duration_s, options.max_concurrency, options.client_processes
    ramp, per_second = None, options.request_rate
    if options.ramp_up_strategy is not None and options.ramp_up_start_rps and options.ramp_up_end_rps:
        ramp = Ramp(options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)
        per_second = (options.ramp_up_start_rps + options.ramp_up_end_rps) / 2
    requests = source.endless(load.first)
    if seconds is not None and per_second == math.inf:
        assert concurrency is not None
        if processes > 1:
            return await send_in_processes(load.closed_loop(seconds), processes, watch, progress, rule)
        return await send_for(client, source.endpoint, requests, seconds, concurrency, progress, rule=rule)
    count = len(load.first) if seconds is None else max(1, round(per_second * seconds))
    chosen = [next(requests) for _ in range(count)]
    if chosen[0].at is not None and per_second == math.inf:
        offsets = [request.at or 0.0 for request in chosen]
    else:
        starting = [index for index, request in enumerate(chosen) if request.follows is None]
        times = arrival_times(len(starting), per_second, options.burstiness, load.rng, ramp)
        offsets = [0.0] * count
        for index, offset in zip(starting, times, strict=True):
            offsets[index] = offset
    if processes > 1:
        return await send_in_processes(load.share(chosen, offsets), processes, watch, progress, rule)
    return await send_at(client, source.endpoint, chosen, offsets, concurrency, progress, rule=rule)


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


def _connection_warnings(timings: Sequence[Timing]) -> list[str]:
    """What to do about requests that an aiakq server refused because they all come from one address."""
    refused = sum("from one address" in (timing.error or "") for timing in timings)
    if not refused:
        return []
    return [
        f"The server refused {refused} requests: this client had more connections open than it takes from one address. "
        "Give --max-concurrency here, or raise --max-connections-per-address of aiakq serve."
    ]


def _is_cut(options: ServeOptions) -> bool:
    return bool(options.warmup_s or options.cooldown_s)


def _window(timings: Sequence[Timing], started: float, options: ServeOptions, stopped: bool) -> tuple[float, float]:
    """The first and the last moment that count. Raises ``usage`` if nothing was due between them."""
    if not _is_cut(options):
        return started, max(timing.ended for timing in timings)
    last = max(timing.scheduled for timing in timings)
    if options.duration_s is not None and not stopped:
        last = started + options.duration_s
    window = started + options.warmup_s, last - options.cooldown_s
    if not any(window[0] <= timing.scheduled < window[1] for timing in timings):
        raise error("usage", reason="Nothing of the load is measured.", hint="Send more, or lower --warmup-seconds.")
    return window


def _metrics(timings: Sequence[Timing], started: float, options: ServeOptions, stopped: bool) -> dict[str, Any]:
    window = _window(timings, started, options, stopped)
    metrics = measure(timings, window[1] - window[0], limits_of(options), window if _is_cut(options) else None)
    if options.save_detailed or options.html is not None:
        metrics["detailed"] = detailed(timings, started)
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


def _config(options: ServeOptions, count: int, source: RequestSource, model: ServedModel) -> dict[str, Any]:
    """The options with the values used."""
    name = workload.workload_name(options)
    return {
        **{key: value for key, value in asdict(options).items() if key not in ("api_key", "seed", "host", "port")},
        "workload": name,
        "dataset": name if options.dataset is None else str(options.dataset),
        "model": model.name,
        "num_prompts": count,
        "vocab_size": source.vocab_size,
        "ignore_eos": source.endpoint.ignore_eos,
        "server_version": model.server_version,
    }
