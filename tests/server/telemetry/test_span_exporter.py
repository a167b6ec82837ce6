"""Log lines when a collector is unreachable and when it is available again."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from aiakq.server.telemetry import span_exporter, traces
from aiakq.server.telemetry.request_records import RequestRecord
from aiakq.server.telemetry.span_exporter import ReportingExporter

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'aiakq[traces]'")
import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SpanExportResult


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Everything that is logged by us and by OpenTelemetry."""
    found: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    keeper = Keeper()
    loggers = [logging.getLogger(name) for name in ("aiakq", "opentelemetry")]
    for logger in loggers:
        logger.addHandler(keeper)
    yield found
    for logger in loggers:
        logger.removeHandler(keeper)


class Scripted:
    """An exporter whose result and exception are set by the test."""

    def __init__(self) -> None:
        self.fails = True
        self.raises: Exception | None = None

    def export(self, spans: Any) -> SpanExportResult:
        logger = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        if self.raises is not None:
            raise self.raises
        if self.fails:
            logger.warning("Transient error Pool(host='a'): Max retries (Caused by [Errno 111] Connection refused'))")
            logger.error("Failed to export span batch due to timeout, max retries or shutdown.")
        return SpanExportResult.FAILURE if self.fails else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        return

    def force_flush(self, timeout_millis: int = 1) -> bool:
        return True


def test_a_collector_that_stays_away_is_one_line_a_minute_and_one_when_it_is_back(lines, monkeypatch):
    now = 100.0
    monkeypatch.setattr(span_exporter.time, "monotonic", lambda: now)
    scripted = Scripted()
    exporter = ReportingExporter(scripted, "collector:4318")
    for _ in range(20):
        assert exporter.export(["span"] * 3) is SpanExportResult.FAILURE
    now += 61
    exporter.export(["span"])
    scripted.fails = False
    for _ in range(2):
        assert exporter.export(["span"]) is SpanExportResult.SUCCESS
    exporter.shutdown()
    away = (
        "Traces do not arrive at collector:4318: Connection refused. Spans lost so far: {}. Requests are not affected."
    )
    assert lines == [
        away.format(3),
        away.format(61),
        "Traces arrive at collector:4318 again. Spans lost: 61.",
    ]


def test_an_exporter_that_raises_loses_its_batch_only(lines):
    scripted = Scripted()
    scripted.raises = OSError("no route")
    exporter = ReportingExporter(scripted, "c")
    assert exporter.export(["span"]) is SpanExportResult.FAILURE
    exporter.shutdown()
    assert "no route" in lines[0]


def test_other_lines_of_opentelemetry_are_left_alone(lines):
    exporter = ReportingExporter(Scripted(), "c")
    logging.getLogger("opentelemetry.sdk.trace").warning("Invalid type for attribute")
    logging.getLogger("opentelemetry.sdk._shared_internal").warning("Queue full, dropping %s.", "Span")
    exporter.shutdown()
    logging.getLogger("opentelemetry.exporter.otlp").warning("after the end")
    assert lines[0] == "Invalid type for attribute" and lines[2] == "after the end"
    assert "faster than they can be sent. Spans lost so far: 1." in lines[1]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_spans_arrive_when_the_collector_starts_and_restarts(lines, monkeypatch, protocol):
    monkeypatch.setattr(traces, "DELAY_SECONDS", 0.05)
    monkeypatch.setattr(traces, "EXPORT_SECONDS", 1.5)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tracer = traces.Tracer(
        {"http": f"http://user:secret@127.0.0.1:{port}", "grpc": f"grpc://127.0.0.1:{port}"}[protocol]
    )
    got: list[str] = []

    def send_until(text: str, count: int) -> None:
        deadline = time.monotonic() + 60
        while sum(text in line for line in lines) < count:
            assert time.monotonic() < deadline, lines
            record = RequestRecord("/v1/completions", "1", time.monotonic())
            tracer.begin(record)
            record.end("stop", None)
            tracer.finish(record)
            time.sleep(0.1)

    start = {"http": _http_collector, "grpc": _grpc_collector}[protocol]
    send_until("do not arrive", 1)
    stop = start(port, got)
    send_until("again", 1)
    stop()
    got.clear()
    send_until("do not arrive", 2)
    stop = start(port, got)
    send_until("again", 2)
    tracer.stop(5)  # while the collector is there, so that nothing else is lost
    stop()
    assert got
    assert {"http": "Connection refused", "grpc": "UNAVAILABLE"}[protocol] in lines[0]
    assert len(lines) == 4 and not any("secret" in line for line in lines)


@pytest.fixture
def hostile() -> Iterator[Callable[[bytes, int], tuple[str, list[int]]]]:
    """``hostile(answer, repeats)``: the address of a collector that answers so, and the bytes that it could send."""
    listener = socket.create_server(("127.0.0.1", 0))
    stopped = threading.Event()

    def start(answer: bytes, repeats: int) -> tuple[str, list[int]]:
        sent: list[int] = []

        def serve() -> None:
            while not stopped.is_set():
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    sent.append(connection.send(answer))
                    try:
                        for _ in range(repeats):
                            sent[-1] += connection.send(b"a" * 65536)
                    except OSError:
                        pass

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}", sent

    yield start
    stopped.set()
    listener.close()


def exported(address: str) -> SpanExportResult:
    """What becomes of one span sent to ``address``."""
    from opentelemetry.sdk.trace import TracerProvider

    span = TracerProvider().get_tracer("aiakq").start_span("request")
    span.end()
    exporter = ReportingExporter(traces._exporter(address), "collector")
    try:
        return exporter.export([span])
    finally:
        exporter.shutdown()


@pytest.mark.parametrize("length", [b"", b"Content-Length: 99999999999\r\n", b"Content-Encoding: gzip\r\n"])
def test_a_collector_that_answers_without_end_fills_no_memory(hostile, length):
    address, sent = hostile(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n", 3000)
    assert exported(address) is SpanExportResult.SUCCESS
    deadline = time.monotonic() + 20
    while len(sent) < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert sent[0] < 50_000_000, "what fits into the buffers of the sockets"


def test_a_redirect_of_a_collector_is_not_followed(hostile, lines):
    """Neither spans nor the keys in the headers go elsewhere, and the spans are reported as lost."""
    other, reached = hostile(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 0)
    with socket.create_server(("127.0.0.1", 0)) as first:

        def redirect() -> None:
            with first.accept()[0] as connection:
                connection.recv(65536)
                connection.send(b"HTTP/1.1 307 No\r\nLocation: %s/\r\nContent-Length: 0\r\n\r\n" % other.encode())

        threading.Thread(target=redirect, daemon=True).start()
        assert exported(f"http://127.0.0.1:{first.getsockname()[1]}") is SpanExportResult.FAILURE
    assert reached == [] and "do not arrive at collector: it redirects with status 307" in lines[-1]


def _http_collector(port: int, got: list[str]) -> Callable[[], None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append(str(trace_service_pb2.ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop


def _grpc_collector(port: int, got: list[str]) -> Callable[[], None]:
    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            got.append(str(request))
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return lambda: server.stop(0).wait()
