"""``bench serve``: measure the performance of a running server over HTTP, as the client sees it.

The metrics are time to first token (TTFT), time per output token after the first (TPOT), inter-token latency (ITL) and
end-to-end latency (E2EL). Keys follow vLLM's benchmark, so that comparison scripts work.
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
import msgspec

from aiakq.arguments.bench import PRESETS, ServeArguments
from aiakq.bench import client as http
from aiakq.bench import workload
from aiakq.bench.arrivals import Ramp, arrival_times
from aiakq.bench.client import Endpoint, ServedModel, Timing
from aiakq.bench.client_processes import ClosedLoop, Partition, send_in_processes
from aiakq.bench.drafts import draft_metrics
from aiakq.bench.load import ClientLoad, Progress, measure_client, send_at, send_for
from aiakq.bench.local_tokenizer import LocalTokenizer, open_tokenizer
from aiakq.bench.request_metrics import LIMITED, detailed, measure
from aiakq.bench.request_source import RequestSource
from aiakq.bench.stopping import StopRule
from aiakq.bench.summary import milliseconds, summarize
from aiakq.bench.workload import Workload, WorkloadRequest
from aiakq.errors import error
from aiakq.records import Record, environment, load_average


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServeArguments):
    """The options of ``bench serve`` with the server's address.

    base_url      URL of the server, used instead of ``host`` and ``port``.
    model         model name on the server; None for the first one listed.
    num_prompts   number of requests; None for 100 random prompts, or every prompt of the dataset once.
    request_rate  requests per second; infinity sends all at once.
    burstiness    shape of the gamma-distributed gaps; 1 is a Poisson process.
    ignore_eos    None for true with random prompts and false with a dataset.
    goodput       duration ("ttft", "tpot", "e2el") -> limit in milliseconds.
    seed          None for a new one each time.
    """

    base_url: str


def run(options: ServeOptions, progress: Progress, facts: Mapping[str, str] | None = None) -> Record:
    """Send the workload and return its measurements. Failed requests are counted, with the first error.

    facts  engine facts of a server that this process started, stored in the record.
    Raises ``server_unreachable``, ``unknown_model``, ``bench_failed`` if a warm-up request fails, and the errors of the
    workload.
    """
    return asyncio.run(_run(options, progress, facts))


def limits_of(options: ServeOptions) -> Mapping[str, float]:
    """Return the goodput limits: those of ``goodput``, or of the preset; empty without either."""
    return options.goodput or (PRESETS[options.preset] if options.preset else {})


async def _run(options: ServeOptions, progress: Progress, facts: Mapping[str, str] | None) -> Record:
    seed = workload.new_seed() if options.seed is None else options.seed
    rng = random.Random(seed)
    check(options)
    selected_workload = workload.open_workload(options, rng)
    load_before = load_average()
    async with http.open_client(options.base_url, options.api_key, options.timeout_s) as client:
        model = await http.served_model(client, options.model)
        server = await http.server_facts(client)
        source = await _source(client, options, selected_workload, model)
        first = source.batch()
        await _warm_up(client, source, first[0], options, rng)
        before = await http.server_counters(client)
        rule = StopRule(options.max_errors, options.stop_on_overload)
        async with measure_client() as load:
            all_timings = await _send(client, _Load(options, source, first, rng, seed, model, rule), progress, load)
        after = await http.server_counters(client)
    timings = [timing for timing in all_timings if timing.sent]
    cache, drafts = _server_use(before, after)
    warnings = workload.cache_warning(selected_workload.fresh_prompts, cache["hit_rate"]) + selected_workload.warnings()
    if len(timings) > len(first) and not selected_workload.fresh_prompts:
        warnings.append(workload.REPEATED)
    tokens_from = _count_tokens(timings, source.tokenizer)
    warnings += load.warnings() + _token_warnings(tokens_from) + _connection_warnings(timings)
    if rule.reason is not None:
        warnings.append(f"The load ended early: {rule.reason}.")
    metrics = _metrics(timings, load.started, options, stopped=rule.reason is not None)
    if not is_scheduled(options) and first[0].at is None:
        metrics |= milliseconds("scheduled_e2el", [])  # requests had no scheduled times
    metrics |= {"prefix_cache": cache, "speculation": drafts, "tokens_from": tokens_from, "stopped": rule.reason}
    metrics |= {"not_sent": len(all_timings) - len(timings), "client_cpu_share": load.cpu_share}
    metrics["client_lag_ms"] = load.summary()
    config = _config(options, len(all_timings), source, model)
    metrics |= _vllm_settings(config, source.endpoint, options.tokenizer or model.root)
    where = {**environment(), "engine": None if facts is None else dict(facts), "server": server}
    where["load_average"] = [load_before, load_average()]
    return Record("serve", seed, config, metrics, where, tuple(warnings))


def _server_use(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the prefix-cache and speculation metrics between two readings of the server's counters."""
    increase = {name: value - before.get(name, 0.0) for name, value in after.items()}
    queries, hits = (
        increase.get(name) if name in before else None
        for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")
    )
    drafts, tokens, accepted = (
        increase.get(f"spec_decode_num_{name}_total", 0.0) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    by_position: list[float] = []
    while (name := f"accepted.{len(by_position)}") in increase:
        by_position.append(increase[name])
    cache = {"queries": queries, "hits": hits, "hit_rate": workload.hit_rate(queries, hits)}
    return cache, draft_metrics(drafts, tokens, accepted, by_position)


async def _source(
    client: httpx.AsyncClient, options: ServeOptions, selected_workload: Workload, model: ServedModel
) -> RequestSource:
    """Return the source of the requests. Raises ``unknown_model`` for an adapter that the server does not have."""
    for name in options.adapters:
        await http.served_model(client, name)
    ignore_eos = selected_workload.ignore_eos if options.ignore_eos is None else options.ignore_eos
    endpoint = Endpoint(options.endpoint, model.name, ignore_eos, options.extra_body)
    tokenizer = open_tokenizer(options.tokenizer, model.root)
    return RequestSource(
        endpoint, selected_workload, options.vocab_size or model.vocab_size, tokenizer, options.adapters
    )


async def _warm_up(
    client: httpx.AsyncClient, source: RequestSource, first: WorkloadRequest, options: ServeOptions, rng: random.Random
) -> None:
    """Send the warm-up requests, which are not measured. Raises ``bench_failed`` if one fails."""
    assert source.workload is not None
    total = options.num_warmups
    for number in range(total):
        request = first
        if source.workload.fresh_prompts:  # must not put a prefix of a measured prompt into the cache
            size = workload.known_size(source.vocab_size)
            fresh = workload.random_requests(1, options.input_len, options.output_len, size, rng)
            request = source.prepared(fresh)[0]
        timing = Timing(scheduled=time.perf_counter())
        await http.complete(client, source.endpoint, request, timing)
        if timing.error:
            raise error("bench_failed", failed=number + 1, total=total, reason=timing.error.rstrip("."))


def template() -> dict[str, Any]:
    """Return the document of a run without requests, which has every key that a gate may name."""
    metrics = measure([], 0.0, {})
    metrics["prefix_cache"] = {"queries": None, "hits": None, "hit_rate": None}
    metrics["speculation"] = draft_metrics()
    metrics |= {"client_lag_ms": summarize([]), "client_cpu_share": None, "not_sent": None}
    return Record("serve", 0, {}, metrics, {}).document()


def unmeasured(options: ServeOptions) -> dict[str, str]:
    """Return the keys of the template that a run with these options does not measure -> reason."""
    reasons = {}
    limits = limits_of(options)
    if not limits:
        reason = "no limits are given (--goodput or --preset)"
        reasons = dict.fromkeys(("request_goodput", "goodput_share", "goodput_shares"), reason)
    reasons |= {f"goodput_shares.{name}": "no limit is given" for name in LIMITED if limits and name not in limits}
    if not is_scheduled(options) and workload.workload_name(options) not in ("trace", *_other_workloads(options)):
        reason = "requests have no scheduled times (give --request-rate)"
        reasons |= dict.fromkeys(_keys_of("scheduled_e2el"), reason)
    if options.output_len == 1 and workload.workload_name(options) in ("random", "prefix", "conversation"):
        for name in ("tpot", "itl"):
            reasons |= dict.fromkeys(_keys_of(name), "responses have one token (--output-len)")
    return reasons


def _other_workloads(options: ServeOptions) -> tuple[str, ...]:
    """Return the workload's name if it is a trace or a plugin, whose requests may have scheduled times."""
    name = workload.workload_name(options)
    return () if name in ("random", "dataset", "prefix", "conversation", "sharegpt") else (name,)


def _keys_of(duration: str) -> list[str]:
    return list(milliseconds(duration, []))


# --- how requests are sent --------------------------------------------------------------------------------------------


def check(options: ServeOptions) -> None:
    """Raise ``usage`` and ``option_conflict`` for options that contradict each other."""
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
        reason = "requests have no scheduled times, so the server cannot fall behind"
        hint = "Give --request-rate."
        raise error("option_conflict", option="--stop-on-overload", other="a rate of inf", reason=reason, hint=hint)
    if options.duration_s is None:
        return
    if options.num_prompts is not None:
        reason = "both set the end of the load"
        raise error("option_conflict", option="--duration", other="--num-prompts", reason=reason, hint="Give one.")
    if options.request_rate == math.inf and None in ramp and options.max_concurrency is None:
        raise error(
            "usage",
            reason="--duration at a rate of inf would send requests without end.",
            hint="Give --request-rate, or --max-concurrency for a fixed number of requests in flight.",
        )
    if workload.workload_name(options) in ("conversation", "trace"):
        reason = "conversations and traces have a fixed number of requests"
        raise error(
            "option_conflict", option="--duration", other="--workload", reason=reason, hint="Give --num-prompts."
        )
    if options.warmup_s + options.cooldown_s >= options.duration_s:
        raise error("usage", reason="Warm-up and cool-down leave nothing to measure.", hint="Raise --duration.")


def is_scheduled(options: ServeOptions) -> bool:
    """Whether requests have scheduled times, from a rate or a ramp."""
    return options.request_rate != math.inf or options.ramp_up_strategy is not None


@dataclass(frozen=True)
class _Load:
    """The load to send: the requests ``first``, followed by further ones of ``source``."""

    options: ServeOptions
    source: RequestSource
    first: Sequence[WorkloadRequest]
    rng: random.Random
    seed: int
    model: ServedModel
    rule: StopRule

    def partition(self, requests: Sequence[WorkloadRequest], offsets: Sequence[float]) -> Partition:
        """Return the load as a single partition, to be split among processes."""
        options, source = self.options, self.source
        server = (options.base_url, options.api_key, options.timeout_s, source.endpoint)
        indices = list(range(len(requests)))
        load = (list(requests), list(offsets), indices, options.max_concurrency)
        return Partition(*server, *load, on_overload=options.stop_on_overload)

    def closed_loop(self, seconds: float) -> Partition:
        """Return a closed-loop load of ``seconds``; each process generates its own prompts if they must be new."""
        options, source = self.options, self.source
        assert source.workload is not None
        loop = ClosedLoop(seconds, self.seed)
        if source.workload.fresh_prompts:
            folders = (options.tokenizer, self.model.root)
            loop = ClosedLoop(
                seconds, self.seed + 1, replace(options, html=None), source.vocab_size, folders, options.adapters
            )
        return msgspec.structs.replace(self.partition(self.first, []), loop=loop)


async def _send(client: httpx.AsyncClient, load: _Load, progress: Progress, watch: ClientLoad) -> list[Timing]:
    """Send the requests as the options say: a number or a duration, at a rate, in a closed loop or as in a trace."""
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
        return await send_in_processes(load.partition(chosen, offsets), processes, watch, progress, rule)
    return await send_at(client, source.endpoint, chosen, offsets, concurrency, progress, rule=rule)


def _count_tokens(timings: Sequence[Timing], tokenizer: LocalTokenizer | None) -> str:
    """Count the tokens of responses without usage. Returns the source of the counts: usage, tokenizer or chunks."""
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
        return [
            "The server sent no usage: output tokens were counted with the local tokenizer, prompt tokens were not."
        ]
    return ["The server sent no usage: every chunk was counted as one token. Give --tokenizer DIR to count tokens."]


def _connection_warnings(timings: Sequence[Timing]) -> list[str]:
    """Return a warning if an aiakq server rejected requests because of its connection limit per address."""
    refused = sum("from one address" in (timing.error or "") for timing in timings)
    if not refused:
        return []
    return [
        f"The server rejected {refused} requests: this client exceeded its limit of connections per address. "
        "Give --max-concurrency here, or raise --max-connections-per-address of aiakq serve."
    ]


def _is_cut(options: ServeOptions) -> bool:
    return bool(options.warmup_s or options.cooldown_s)


def _window(timings: Sequence[Timing], started: float, options: ServeOptions, stopped: bool) -> tuple[float, float]:
    """Return the start and end of the measured interval. Raises ``usage`` if no request was scheduled in it."""
    if not _is_cut(options):
        return started, max(timing.ended for timing in timings)
    last = max(timing.scheduled for timing in timings)
    if options.duration_s is not None and not stopped:
        last = started + options.duration_s
    window = started + options.warmup_s, last - options.cooldown_s
    if not any(window[0] <= timing.scheduled < window[1] for timing in timings):
        reason = "Warm-up and cool-down leave nothing to measure."
        raise error("usage", reason=reason, hint="Send more requests, or lower --warmup-seconds.")
    return window


def _metrics(timings: Sequence[Timing], started: float, options: ServeOptions, stopped: bool) -> dict[str, object]:
    window = _window(timings, started, options, stopped)
    metrics = measure(timings, window[1] - window[0], limits_of(options), window if _is_cut(options) else None)
    if options.save_detailed or options.html is not None:
        metrics["detailed"] = detailed(timings, started)
    return metrics


def _vllm_settings(config: Mapping[str, Any], endpoint: Endpoint, tokenizer: str | None) -> dict[str, object]:
    """Return the settings that vLLM's benchmark writes along with its metrics, by which scripts group results."""
    numbers = {key: _json_number(config[key]) for key in ("request_rate", "burstiness")}
    backend = "openai-chat" if endpoint.is_chat else "openai"
    names = {"backend": backend, "model_id": endpoint.model, "tokenizer_id": tokenizer}
    return {**names, "num_prompts": config["num_prompts"], **numbers, "max_concurrency": config["max_concurrency"]}


def _json_number(value: float) -> float | str:
    """Return a number for JSON, with infinity as a string, as vLLM writes it."""
    return value if math.isfinite(value) else str(value)


def _config(options: ServeOptions, count: int, source: RequestSource, model: ServedModel) -> dict[str, object]:
    """Return the options with their effective values."""
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
