"""Traces of requests, sent with OpenTelemetry's protocol (OTLP); its packages are imported only if they are used.

A request is one span, a child of the client's if the request has a traceparent header. It is sent by a thread of its
own from a bounded queue: a collector that is slow or gone costs spans, never time of a request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import aiakq
from aiakq.errors import error
from aiakq.server.telemetry.request_records import RequestRecord, SequenceRecord
from aiakq.server.telemetry.span_exporter import ReportingExporter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import AttributeValue

#: How spans travel, "grpc" or "http/protobuf"; OpenTelemetry's own variable, which vLLM reads too.
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
#: Spans that wait at most, and how many are sent at a time: encoding them must not keep the event loop waiting.
MAX_QUEUED, BATCH_SIZE = 2048, 64
#: Seconds after which spans are sent, and that sending may take.
DELAY_SECONDS, EXPORT_SECONDS = 1.0, 5.0
_GRPC_PORT = 4317
#: What routes do, in the words of the GenAI conventions; the others chat.
_OPERATIONS = {"/v1/completions": "text_completion"} | dict.fromkeys(
    ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    "embeddings",
)


class Tracer:
    """Sends a span for every request. An observer of requests, see ``RequestObserver``."""

    def __init__(self, endpoint: str, details: Sequence[str] = (), served_name: str = "") -> None:
        """details: those of ``--collect-detailed-traces``. Raises ``traces_missing`` and ``bad_option``."""
        exporter = ReportingExporter(_exporter(endpoint), urlsplit(endpoint).netloc.rpartition("@")[2])
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "aiakq", "service.version": aiakq.__version__}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                cast("SpanExporter", exporter),
                max_queue_size=MAX_QUEUED,
                max_export_batch_size=BATCH_SIZE,
                schedule_delay_millis=1000 * DELAY_SECONDS,
            )
        )
        self._tracer = self._provider.get_tracer("aiakq", aiakq.__version__)
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._shows_phases = bool({"worker", "all"} & set(details))
        self._shows_engine = bool({"model", "all"} & set(details))
        self._served_name = served_name

    def begin(self, record: RequestRecord) -> None:
        """Start the span of a request, in the client's trace if it names one."""
        context = self._propagator.extract(record.headers)
        span = self._tracer.start_span(
            "llm_request",
            context,
            kind=self._trace.SpanKind.SERVER,
            attributes=_first_attributes(record),
            start_time=record.nanoseconds(record.arrival_time),
        )
        record.span = span
        identity = span.get_span_context()
        record.trace_id = f"{identity.trace_id:032x}"
        record.traceparent = f"00-{record.trace_id}-{identity.span_id:016x}-{int(identity.trace_flags):02x}"

    def finish(self, record: RequestRecord) -> None:
        """End the span."""
        span = record.span
        if span is None or not span.is_recording():
            return
        span.set_attributes(_last_attributes(record, self._served_name))
        for name, at in _moments(record):
            span.add_event(name, timestamp=record.nanoseconds(at))
        if record.reason == "error" and record.status not in range(400, 500):
            # What a client did wrong is no error of this server, in OpenTelemetry's conventions for HTTP.
            span.set_status(self._trace.StatusCode.ERROR, record.error)
        context = self._trace.set_span_in_context(span)
        for name, began, ended, attributes in self._details(record):
            child = self._tracer.start_span(name, context, attributes=attributes, start_time=record.nanoseconds(began))
            child.end(record.nanoseconds(ended))
        span.end(record.nanoseconds(record.end_time))

    def stop(self, seconds: float) -> None:
        """Send what is queued, for at most ``seconds``."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        thread.start()
        thread.join(seconds)

    def _details(self, record: RequestRecord) -> list[tuple[str, float, float, dict[str, AttributeValue]]]:
        """The spans inside that of the request: name, beginning, end, attributes."""
        spans: list[tuple[str, float, float, dict[str, AttributeValue]]] = []
        if self._shows_phases:
            spans += [(name, began, ended, {}) for name, began, ended in record.phases]
        if self._shows_engine:
            for index, sequence in enumerate(record.sequences):
                attributes: dict[str, AttributeValue] = {
                    "aiakq.sequence.index": index,
                    "aiakq.num_preemptions": sequence.num_preemptions,
                }
                spans += [(*part, attributes) for part in _engine_phases(sequence)]
        return spans


def _exporter(endpoint: str) -> SpanExporter:
    """The exporter for ``endpoint``. Raises ``traces_missing`` and ``bad_option``."""
    parts = urlsplit(endpoint)
    protocol = os.environ.get(PROTOCOL_VARIABLE)
    try:
        bare = parts.port == _GRPC_PORT and parts.path in ("", "/")
        has_host = bool(parts.hostname)
    except ValueError:
        bare = has_host = False
    if not has_host or parts.scheme not in ("http", "https", "grpc", "grpcs"):
        raise _bad_endpoint(endpoint, "a URL like http://localhost:4318/v1/traces or grpc://localhost:4317")
    if protocol not in (None, "", "grpc", "http/protobuf"):
        raise _bad_endpoint(f"with {PROTOCOL_VARIABLE}={protocol}", "used with grpc or http/protobuf")
    is_grpc = protocol == "grpc" or (not protocol and (parts.scheme.startswith("grpc") or bare))
    if is_grpc and parts.username is not None:
        raise _bad_endpoint(endpoint, "without a user for gRPC; set OTEL_EXPORTER_OTLP_TRACES_HEADERS instead")
    try:
        if is_grpc:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            insecure = None if "OTEL_EXPORTER_OTLP_TRACES_INSECURE" in os.environ else parts.scheme in ("http", "grpc")
            return GrpcExporter(endpoint=endpoint, insecure=insecure, timeout=EXPORT_SECONDS)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        from aiakq.server.telemetry.collector_session import CollectorSession

        scheme = parts.scheme.replace("grpc", "http")
        path = parts.path if parts.path not in ("", "/") else "/v1/traces"
        address = parts._replace(scheme=scheme, path=path).geturl()
        # A session of OpenTelemetry's own plugins goes first.
        session = None if any("_CREDENTIAL_PROVIDER" in name for name in os.environ) else CollectorSession()
        return HttpExporter(endpoint=address, timeout=EXPORT_SECONDS, session=session)
    except ImportError as failure:
        raise error("traces_missing", package=failure.name or "opentelemetry") from None


def _bad_endpoint(value: str, expected: str) -> Exception:
    hint = "Without a path, port 4317 is gRPC and any other HTTP, at /v1/traces."
    return error("bad_option", option="--otlp-traces-endpoint", value=value, expected=expected, hint=hint)


def _first_attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    """Return the attributes known on arrival, which samplers see, under OpenTelemetry's HTTP and GenAI names."""
    return {
        "gen_ai.operation.name": _OPERATIONS.get(record.route, "chat"),
        "gen_ai.provider.name": "aiakq",
        "gen_ai.request.id": record.request_id,
        "http.request.method": "POST",
        "http.route": record.route,
        "url.path": record.route,
    }


def _last_attributes(record: RequestRecord, served_name: str) -> dict[str, AttributeValue]:
    """Return the attributes known at the end, under GenAI names, or vLLM's where there are none."""
    params = record.params
    scheduled, first, last = record.earliest("scheduled"), record.earliest("first_token"), record.latest("last_token")
    arrival = record.arrival_time
    attributes: dict[str, AttributeValue] = {
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": served_name,
        "gen_ai.response.id": record.response_id,
        "gen_ai.response.finish_reasons": [each.finish_reason for each in record.sequences if each.finish_reason],
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.total("num_generated"),
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": record.total("num_generated"),
        "gen_ai.usage.num_sequences": len(record.sequences),
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.latency.e2e": record.end_time - arrival,
        "gen_ai.latency.time_in_queue": record.queue_seconds,
        "gen_ai.latency.time_to_first_token": _between(arrival, first),
        "gen_ai.latency.time_in_model_prefill": _between(scheduled, first),
        "gen_ai.latency.time_in_model_decode": _between(first, last),
        "gen_ai.latency.time_in_model_inference": _between(scheduled, last),
        "aiakq.client_request_id": record.client_request_id,
        "aiakq.num_preemptions": record.total("num_preemptions"),
        "error.type": record.error,
    }
    if params is not None:
        attributes |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
            "gen_ai.request.n": params.n,
            "gen_ai.request.stream": record.streamed,
        }
    return {name: value for name, value in attributes.items() if value not in (None, "", [])}


def _moments(record: RequestRecord) -> list[tuple[str, float]]:
    """The events of a request's span."""
    moments = [
        ("scheduled", record.earliest("scheduled")),
        ("first_token", record.earliest("first_token")),
        ("last_token", record.latest("last_token")),
    ]
    return [(name, at) for name, at in moments if at is not None]


def _engine_phases(sequence: SequenceRecord) -> list[tuple[str, float, float]]:
    """Return the engine's phases for one sequence."""
    times = sequence.times
    if times is None or times.scheduled is None:
        return []
    phases = [("queue", times.arrived, times.scheduled)]
    if times.first_token is not None:
        phases.append(("prefill", times.scheduled, times.first_token))
        if times.last_token is not None:
            phases.append(("decode", times.first_token, times.last_token))
    return phases


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
