"""What ``/metrics`` shows: vLLM's names, the names of the AIAK reference page, and their aliases.

Units. A *request* is one HTTP request that asks to generate; a *sequence* is one of the (prompts x n) texts it asks
for. With one prompt and n=1, the usual case, they are the same. Counted per request: request_total (every one that
arrives), request_success_total by reason, request_process_success_total (reasons stop and length),
request_process_fail_total (refused, failed or abandoned), request_params_n, and the end-to-end latency. So

    request_total = request_process_success_total + request_process_fail_total + those still running.

Everything about tokens and phases is per sequence. Times to the first token, between tokens and end to end are taken on
the HTTP side's clock; times of phases (queue, prefill, decode, inference) on the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from aiakq.errors import AiakqError
from aiakq.runtime.engine.messages import EngineStats, RequestTimes

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SMALL_COUNTS = (1, 2, 5, 10, 20)

#: Why a request ended; every value is present from the start, so that dashboards show 0 instead of nothing.
REASONS = ("stop", "length", "abort", "error")
#: Why a request was not taken: too much was waiting, it waited too long, there was no engine.
REFUSALS = ("queue_full", "queue_timeout", "unavailable")


def _one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``most``."""
    values: list[int] = []
    scale = 1
    while scale <= most:
        values += [mantissa * scale for mantissa in (1, 2, 5) if mantissa * scale <= most]
        scale *= 10
    return tuple(values)


class Metrics:
    """Every metric of one server, in a registry of its own."""

    def __init__(self, model_name: str, max_model_len: int, settings: Mapping[str, str]) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._stats = EngineStats()
        tokens = _one_two_five(max_model_len)

        # --- the engine, from its statistics after each step
        self.running = self._gauge("num_requests_running", "Sequences in the engine's current batch.")
        self.waiting = self._gauge("num_requests_waiting", "Sequences waiting for a place in the batch.")
        self.cache_usage = [
            self._gauge("kv_cache_usage_perc", "Part of the KV pages in use, 0 to 1."),
            self._gauge("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc."),
        ]
        self.preemptions = self._counter("num_preemptions_total", "Times a sequence gave its KV pages back.")
        self.prefix_queries = self._counter(
            "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hits = self._counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
        self.step_tokens = self._histogram("iteration_tokens_total", "Tokens per engine step.", _STEP_TOKENS)
        info = Gauge(
            "vllm:cache_config_info", "Settings of the cache, as labels.", list(settings), registry=self.registry
        )
        info.labels(**settings).set(1)

        self.restarts = self._counter(
            "engine_restarts_total", "Engines started again after they ended or hung.", prefix="aiakq"
        )

        # --- requests
        self.received = self._counter("request_total", "Requests received, those refused included.")
        self.succeeded = self._counter("request_process_success_total", "Requests answered completely.")
        self.failed = self._counter("request_process_fail_total", "Requests refused, failed or abandoned.")
        ended = Counter(
            "vllm:request_success_total",
            "Requests ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self.ended = {reason: ended.labels(**self._labels, finished_reason=reason) for reason in REASONS}
        self.latency = self._histogram("e2e_request_latency_seconds", "Arrival to end of a request.", _LATENCY)
        self.params_n = self._histogram("request_params_n", "The parameter n of requests.", _SMALL_COUNTS)

        for name, text in (("lora_count", "Requests to an adapter."), ("lora_time_e2e_requests", "Seconds they took.")):
            # Gauges, because a counter's name would end in _total. Without adapters there is one, of no name.
            gauge = Gauge(f"vllm:{name}", text, [*self._labels, "lora_name"], registry=self.registry)
            gauge.labels(**self._labels, lora_name="").set(0)
        refused = Counter(
            "vllm:admission_rejections_total",
            "Requests refused because too much was waiting.",
            [*self._labels, "reason"],
            registry=self.registry,
        )
        self.refused = {reason: refused.labels(**self._labels, reason=reason) for reason in REFUSALS}

        # --- sequences
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of sequences that got a first token.")
        self.cached_tokens = self._counter("prompt_tokens_cached_total", "Those of them taken from the prefix cache.")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated.")
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN)
        self.gap = self._histogram("inter_token_latency_seconds", "Time between two tokens.", _BETWEEN_TOKENS)
        self.per_token = [
            self._histogram(name, "Mean time per token after the first, of a sequence.", _BETWEEN_TOKENS)
            for name in ("time_per_output_token_seconds", "request_time_per_output_token_seconds")
        ]
        self.queue = self._histogram("request_queue_time_seconds", "Waiting for the first step.", _LATENCY)
        self.prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", _LATENCY)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last token.", _LATENCY)
        self.inference = [
            self._histogram(name, "First step to last token.", _LATENCY)
            for name in ("inference_compute_infer_duration", "request_inference_time_seconds")
        ]
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence.", tokens)
        self.output_length = self._histogram("request_generation_tokens", "Tokens generated for a sequence.", tokens)
        self.longest_output = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest sequence.", tokens
        )
        self.max_tokens = self._histogram("request_params_max_tokens", "The parameter max_tokens.", tokens)
        self.sequence_preemptions = self._histogram(
            "request_num_preemptions", "Times a sequence gave its KV pages back.", (0, *_SMALL_COUNTS)
        )

    def step(self, stats: EngineStats) -> None:
        """Take over the engine's statistics; its counters only grow."""
        before, self._stats = self._stats, stats
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        for gauge in self.cache_usage:
            gauge.set(stats.kv_usage)
        self.preemptions.inc(stats.preemptions - before.preemptions)
        self.prefix_queries.inc(stats.prefix_queries - before.prefix_queries)
        self.prefix_hits.inc(stats.prefix_hits - before.prefix_hits)
        if stats.num_scheduled_tokens:
            self.step_tokens.observe(stats.num_scheduled_tokens)

    def engine_ended(self) -> None:
        """Nothing runs any more; the next engine counts from zero."""
        self._stats = EngineStats()
        for gauge in (self.running, self.waiting, *self.cache_usage):
            gauge.set(0)

    def request_ended(self, reason: str, seconds: float) -> None:
        """One request is over; ``reason`` is one of ``REASONS``."""
        self.ended[reason].inc()
        (self.succeeded if reason in ("stop", "length") else self.failed).inc()
        self.latency.observe(seconds)

    def request_refused(self, failure: AiakqError) -> None:
        """A request ended with ``failure``; those that were not taken for want of room are counted apart."""
        if failure.http_status == 503:
            reasons = {"overloaded": "queue_full", "queue_timeout": "queue_timeout"}
            self.refused[reasons.get(failure.id, "unavailable")].inc()

    def sequence_ended(
        self, prompt_tokens: int, generated: int, max_tokens: int, preemptions: int, times: RequestTimes | None
    ) -> None:
        """One sequence is over."""
        self.prompt_length.observe(prompt_tokens)
        self.output_length.observe(generated)
        self.max_tokens.observe(max_tokens)
        self.sequence_preemptions.observe(preemptions)
        if times is None or times.scheduled is None:
            return
        self.queue.observe(times.scheduled - times.arrived)
        if times.first_token is None or times.last_token is None:
            return
        self.prefill.observe(times.first_token - times.scheduled)
        self.decode.observe(times.last_token - times.first_token)
        for histogram in self.inference:
            histogram.observe(times.last_token - times.scheduled)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str, prefix: str = "vllm") -> Counter:
        return Counter(f"{prefix}:{name}", text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, list(self._labels), buckets=buckets, registry=self.registry)
        return metric.labels(**self._labels)
