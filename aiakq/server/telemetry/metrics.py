"""Prometheus metrics of ``/metrics``: vLLM's names, the names of the AIAK reference page, and aliases.

Units. A *request* is one HTTP request that asks to generate; a *sequence* is one of the (prompts x n) texts it asks
for. With one prompt and n=1, the usual case, they are the same. Counted per request: request_total (every one that
arrives), request_success_total by reason, request_process_success_total (reasons stop and length),
request_process_fail_total (refused, failed or abandoned), request_params_n, and the end-to-end latency. So

    request_total = request_process_success_total + request_process_fail_total + those still running.

Everything about tokens and phases is per sequence. Times to the first token, between tokens and end to end are taken on
the HTTP side's clock; times of phases (queue, prefill, decode, inference) on the engine's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics import MetricWrapperBase

from aiakq.errors import AiakqError
from aiakq.runtime.protocol.output import EngineStats, RequestTimes

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)
CONTENT_TYPE = CONTENT_TYPE_LATEST

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SMALL_COUNTS = (1, 2, 5, 10, 20)

#: Why a request ended. Every value is exported from the start, so that dashboards show 0 instead of no data.
FINISH_REASONS = ("stop", "length", "abort", "error")
#: Why a request was rejected: the queue was full, it waited too long, there was no engine.
REJECTION_REASONS = ("queue_full", "queue_timeout", "unavailable")


def _one_two_five(maximum: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``maximum``."""
    values: list[int] = []
    scale = 1
    while scale <= maximum:
        values += [mantissa * scale for mantissa in (1, 2, 5) if mantissa * scale <= maximum]
        scale *= 10
    return tuple(values)


class Metrics:
    """Every metric of one server, in a registry of its own."""

    def __init__(self, model_name: str, max_model_len: int, settings: Mapping[str, str]) -> None:
        self.registry = CollectorRegistry()
        self._families: dict[str, MetricWrapperBase] = {}
        self._arguments = model_name, max_model_len, settings
        self._add(0)

    def of_engine(self, number: int) -> Metrics:
        """The metrics of another engine of the server, in the same registry. Engine 0's are also the server's."""
        if number == 0:
            return self
        other = Metrics.__new__(Metrics)
        other.registry, other._families, other._arguments = self.registry, self._families, self._arguments
        other._add(number)
        return other

    def _add(self, engine: int) -> None:
        model_name, max_model_len, settings = self._arguments
        self._labels = {"model_name": model_name, "engine": str(engine)}
        self._stats = EngineStats()
        self._add_engine_metrics(settings)
        self._add_request_metrics()
        self._add_sequence_metrics(_one_two_five(max_model_len))

    def _add_engine_metrics(self, settings: Mapping[str, str]) -> None:
        """Gauges and counters taken from the engine's statistics after each step."""
        self.num_running = self._gauge("num_requests_running", "Sequences in the engine's current batch.")
        self.num_waiting = self._gauge("num_requests_waiting", "Sequences waiting for a place in the batch.")
        by_reason = self._family(
            Gauge,
            "vllm:num_requests_waiting_by_reason",
            "Waiting sequences: capacity for a place in the batch, deferred for an adapter.",
            [*self._labels, "reason"],
        )
        self.waiting_by_reason = {
            reason: by_reason.labels(**self._labels, reason=reason) for reason in ("capacity", "deferred")
        }
        self.num_clients = self._gauge(
            "num_clients", "Clients with running or waiting sequences, with --fair-share; else 1 or 0.", prefix="aiakq"
        )
        self.kv_cache_usage = [
            self._gauge("kv_cache_usage_perc", "Part of the KV pages in use, 0 to 1."),
            self._gauge("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc."),
        ]
        self.preemptions = self._counter("num_preemptions_total", "Times a sequence gave its KV pages back.")
        self.prefix_queries = [
            self._counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
            self._counter("gpu_prefix_cache_queries_total", "Older name of prefix_cache_queries_total."),
        ]
        self.prefix_hits = [
            self._counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
            self._counter("gpu_prefix_cache_hits_total", "Older name of prefix_cache_hits_total."),
        ]
        self.drafting_steps = self._counter(
            "spec_decode_num_drafts_total", "Verifications: times that a sequence had draft tokens in a step."
        )
        self.drafts = self._counter("spec_decode_num_draft_tokens_total", "Draft tokens.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens_total", "Accepted draft tokens.")
        self.emitted = self._counter("spec_decode_num_emitted_tokens_total", "Tokens that verifications generated.")
        self.acceptance_rate = self._gauge("spec_decode_draft_acceptance_rate", "Accepted draft tokens of all, 0 to 1.")
        self.efficiency = self._gauge(
            "spec_decode_efficiency", "Tokens that verifications generated of those they could have, 0 to 1."
        )
        self.step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens generated in a step, and those of prompts completed in it.", _STEP_TOKENS
        )
        info = self._family(Gauge, "vllm:cache_config_info", "Settings of the cache, as labels.", list(settings))
        info.labels(**settings).set(1)
        self.engine_restarts = self._counter(
            "engine_restarts_total", "Engines started again after they ended or hung.", prefix="aiakq"
        )
        self.tokenizer_restarts = self._family(
            Counter,
            "aiakq:tokenizer_restarts_total",
            "Processes and workers of the tokenizer replaced after they ended or hung.",
            [],
        )

    def _add_request_metrics(self) -> None:
        """Create the metrics that are counted once per HTTP request."""
        self.received = self._counter("request_total", "Requests received, those refused included.")
        self.succeeded = self._counter("request_process_success_total", "Requests answered completely.")
        self.failed = self._counter("request_process_fail_total", "Requests refused, failed or abandoned.")
        self.finished = self._counters(
            "request_success_total", "Requests ended, by reason.", "finished_reason", FINISH_REASONS
        )
        self.latency = self._histogram("e2e_request_latency_seconds", "Arrival to end of a request.", _LATENCY)
        self.params_n = self._histogram("request_params_n", "The parameter n of requests.", _SMALL_COUNTS)
        # Gauges, because a counter's name would end in _total. Without adapters there is one, of no name.
        self.of_adapters = [
            self._family(Gauge, f"vllm:{name}", text, [*self._labels, "lora_name"])
            for name, text in (
                ("lora_count", "Requests to an adapter."),
                ("lora_time_e2e_requests", "Seconds they took."),
            )
        ]
        for gauge in self.of_adapters:
            gauge.labels(**self._labels, lora_name="").set(0)
        self.adapters = self._family(
            Gauge,
            "vllm:lora_requests_info",
            "When the adapters of running and of waiting requests were these, in seconds since 1970.",
            ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        self.ignored_fields = self._family(
            Counter, "aiakq:ignored_request_fields_total", "Unknown fields of requests that were ignored.", []
        )
        self._statuses = self._family(
            Counter, "http_requests_total", "Answers by route, method and status.", ["handler", "method", "status"]
        )
        for method in ("GET", "POST"):
            self._statuses.labels("none", method, "4xx")
        self.rejections = self._counters(
            "admission_rejections_total",
            "Requests refused because too much was waiting.",
            "reason",
            REJECTION_REASONS,
        )

    def _add_sequence_metrics(self, token_counts: tuple[int, ...]) -> None:
        """Create the metrics that are counted once per sequence or token."""
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of sequences that got a first token.")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached_total", "Those of them taken from the prefix cache."
        )
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated.")
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens.", _BETWEEN_TOKENS
        )
        self.time_per_output_token = [
            self._histogram(name, "Mean time per token after the first, of a sequence.", _BETWEEN_TOKENS)
            for name in ("time_per_output_token_seconds", "request_time_per_output_token_seconds")
        ]
        self.queue_time = self._histogram("request_queue_time_seconds", "Waiting for the first step.", _LATENCY)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "First step to first token.", _LATENCY)
        self.decode_time = self._histogram("request_decode_time_seconds", "First token to last token.", _LATENCY)
        self.inference_time = [
            self._histogram(name, "First step to last token.", _LATENCY)
            for name in ("inference_compute_infer_duration", "request_inference_time_seconds")
        ]
        self.num_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence.", token_counts)
        self.num_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a sequence.", token_counts
        )
        self.max_num_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest sequence.", token_counts
        )
        self.params_max_tokens = self._histogram("request_params_max_tokens", "The parameter max_tokens.", token_counts)
        self.num_preemptions = self._histogram(
            "request_num_preemptions", "Times a sequence gave its KV pages back.", (0, *_SMALL_COUNTS)
        )

    def step(self, stats: EngineStats) -> None:
        """Update from the engine's statistics, whose counters only grow."""
        previous, self._stats = self._stats, stats
        self.num_running.set(stats.num_running)
        self.num_waiting.set(stats.num_waiting)
        self.waiting_by_reason["deferred"].set(stats.num_deferred)
        self.waiting_by_reason["capacity"].set(stats.num_waiting - stats.num_deferred)
        self.num_clients.set(stats.num_clients)
        for gauge in self.kv_cache_usage:
            gauge.set(stats.kv_usage)
        self.preemptions.inc(stats.preemptions - previous.preemptions)
        for counter in self.prefix_queries:
            counter.inc(stats.prefix_queries - previous.prefix_queries)
        for counter in self.prefix_hits:
            counter.inc(stats.prefix_hits - previous.prefix_hits)
        drafts, before = stats.drafts, previous.drafts
        self.drafting_steps.inc(drafts.steps - before.steps)
        self.drafts.inc(drafts.drafts - before.drafts)
        self.accepted.inc(drafts.accepted - before.accepted)
        # Every verification generates one token more than it accepts.
        self.emitted.inc(drafts.accepted + drafts.steps - before.accepted - before.steps)
        if drafts.drafts:
            self.acceptance_rate.set(drafts.accepted / drafts.drafts)
            self.efficiency.set((drafts.accepted + drafts.steps) / (drafts.drafts + drafts.steps))
        if drafts.by_position:
            name, positions = (
                "spec_decode_num_accepted_tokens_per_pos_total",
                tuple(map(str, range(len(drafts.by_position)))),
            )
            counters = self._counters(name, "Accepted draft tokens, by position.", "position", positions)
            for counter, now, old in itertools.zip_longest(counters.values(), drafts.by_position, before.by_position):
                counter.inc(now - (old or 0))
        num_tokens = stats.prompt_tokens - previous.prompt_tokens + stats.generation_tokens - previous.generation_tokens
        if num_tokens:
            self.step_tokens.observe(num_tokens)

    def engine_ended(self) -> None:
        """Reset the gauges; the counters of the next engine start at zero."""
        self._stats = EngineStats()
        waiting = (self.num_waiting, *self.waiting_by_reason.values())
        for gauge in (self.num_running, *waiting, self.num_clients, *self.kv_cache_usage):
            gauge.set(0)

    def show_adapters(self, running: list[str], waiting: list[str], most: int, now: float) -> None:
        """Names of the adapters of running and of waiting requests; ``most`` run at a time."""
        self.adapters.clear()
        self.adapters.labels(most, ",".join(running), ",".join(waiting)).set(now)

    def adapter_removed(self, name: str) -> None:
        """Requests can no longer name an adapter: its counts end, so that labels do not grow without bounds."""
        for gauge in self.of_adapters:
            with suppress(KeyError):  # no request has used it
                gauge.remove(*self._labels.values(), name)

    def request_ended(self, reason: str, seconds: float, adapter: str | None = None) -> None:
        """Count a request that ended; ``reason`` is one of ``FINISH_REASONS``, ``adapter`` a served name."""
        if adapter is not None:
            for gauge, value in zip(self.of_adapters, (1.0, seconds), strict=True):
                gauge.labels(**self._labels, lora_name=adapter).inc(value)
        self.finished[reason].inc()
        (self.succeeded if reason in ("stop", "length") else self.failed).inc()
        self.latency.observe(seconds)

    def count_status(self, method: str, path: str, status: str) -> None:
        """Count an answer; the arguments have few values, see ``StatusCounts``."""
        self._statuses.labels(path, method, status).inc()

    def request_refused(self, failure: AiakqError) -> None:
        """Count a request refused with ``failure``, if it is one for lack of room or of an engine."""
        if failure.http_status == 503:
            reasons = {"overloaded": "queue_full", "queue_timeout": "queue_timeout"}
            self.rejections[reasons.get(failure.id, "unavailable")].inc()

    def sequence_ended(
        self,
        num_prompt_tokens: int,
        num_generated: int,
        max_tokens: int,
        num_preemptions: int,
        times: RequestTimes | None,
    ) -> None:
        """Record the lengths and times of a finished sequence."""
        self.num_prompt_tokens.observe(num_prompt_tokens)
        self.num_generation_tokens.observe(num_generated)
        self.params_max_tokens.observe(max_tokens)
        self.num_preemptions.observe(num_preemptions)
        if times is None or times.scheduled is None:
            return
        self.queue_time.observe(times.scheduled - times.arrived)
        if times.first_token is None or times.last_token is None:
            return
        self.prefill_time.observe(times.first_token - times.scheduled)
        self.decode_time.observe(times.last_token - times.first_token)
        for histogram in self.inference_time:
            histogram.observe(times.last_token - times.scheduled)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str, prefix: str = "vllm") -> Gauge:
        return self._family(Gauge, f"{prefix}:{name}", text, self._labels).labels(**self._labels)

    def _counter(self, name: str, text: str, prefix: str = "vllm") -> Counter:
        return self._family(Counter, f"{prefix}:{name}", text, self._labels).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = self._families.get(f"vllm:{name}")
        if not isinstance(family, Histogram):
            family = Histogram(f"vllm:{name}", text, self._labels, registry=self.registry, buckets=buckets)
            self._families[f"vllm:{name}"] = family
        return family.labels(**self._labels)

    def _family(self, kind: type[_Metric], name: str, text: str, labels: Iterable[str]) -> _Metric:
        """A metric with its labels, made once for all engines."""
        family = self._families.get(name)
        if not isinstance(family, kind):
            family = self._families[name] = kind(name, text, labels, registry=self.registry)
        return family

    def _counters(self, name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
        """One counter per value of ``label``."""
        counter = self._family(Counter, f"vllm:{name}", text, [*self._labels, label])
        return {value: counter.labels(**self._labels, **{label: value}) for value in values}
