"""Traces: what a collector gets over HTTP and over gRPC, and that none of it costs a request anything."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from aiakq.errors import AiakqError
from aiakq.server.telemetry.traces import Tracer

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'aiakq[traces]'")
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

FEW = {"num_gpu_blocks_override": 65, "served_model_name": ["tinybooks"]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = PARENT.removesuffix("1") + "0"


class Collector:
    """What a collector received: spans with their attributes, and the attributes of the resource."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, Any] = {}

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            self.resource = attributes(group.resource)
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def requests(self, count: int) -> list[Any]:
        """The spans of requests, once there are so many."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = [span for span in self.spans if span.name == "llm_request"]
            if len(found) >= count:
                assert len(found) == count
                return found
            time.sleep(0.05)
        raise AssertionError(f"{len(self.spans)} spans came, not those of {count} requests")


def attributes(owner: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {each.key: plain(each.value) for each in owner.attributes}


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector over HTTP and its address."""
    got = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            got.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield got, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_request_is_a_span_in_the_trace_of_its_client(start_server, collector):
    got, url = collector
    with start_server(otlp_traces_endpoint=url, collect_detailed_traces=["all"], **FEW) as server:
        body = {
            "prompt": "Once upon",
            "max_tokens": 5,
            "ignore_eos": True,
            "temperature": 0,
            "n": 2,
            "model": "tinybooks",
        }
        headers = {"traceparent": PARENT, "x-request-id": "mine-7"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, trust_env=False)
        usage = answer.json()["usage"]
        refused = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": 3}, trust_env=False)
        hidden = httpx.post(
            f"{server.url}/v1/completions", json=body, headers={"traceparent": NOT_SAMPLED}, trust_env=False
        )
        assert hidden.status_code == 200 and hidden.headers["traceparent"].endswith("-00")
        first, second = got.requests(2)
        server.stop()
    assert got.resource["service.name"] == "aiakq" and got.resource["service.version"]
    assert first.trace_id.hex() == PARENT.split("-")[1] and first.parent_span_id.hex() == PARENT.split("-")[2]
    assert answer.headers["traceparent"] == f"00-{first.trace_id.hex()}-{first.span_id.hex()}-01"
    assert answer.headers["traceresponse"] == answer.headers["traceparent"]
    assert first.kind == 2 and first.status.code == 0
    values = attributes(first)
    assert values["gen_ai.operation.name"] == "text_completion"
    assert values["gen_ai.request.model"] == values["gen_ai.response.model"] == "tinybooks"
    assert values["gen_ai.response.id"] == answer.json()["id"]
    assert values["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert values["gen_ai.usage.prompt_tokens"] == values["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert values["gen_ai.usage.completion_tokens"] == values["gen_ai.usage.output_tokens"] == 10
    assert values["gen_ai.request.max_tokens"] == 5 and values["gen_ai.request.n"] == 2
    assert values["gen_ai.request.temperature"] == 0
    assert values["http.response.status_code"] == 200 and values["http.route"] == "/v1/completions"
    assert (
        values["aiakq.client_request_id"] == "mine-7" and values["gen_ai.request.id"] == answer.headers["x-request-id"]
    )
    e2e = values["gen_ai.latency.e2e"]
    assert 0 < values["gen_ai.latency.time_to_first_token"] < e2e
    assert 0 <= values["gen_ai.latency.time_in_queue"] < e2e
    assert e2e == pytest.approx((first.end_time_unix_nano - first.start_time_unix_nano) / 1e9, abs=1e-3)
    assert abs(first.start_time_unix_nano / 1e9 - time.time()) < 300
    assert [event.name for event in first.events] == ["scheduled", "first_token", "last_token"]
    children = [span for span in got.spans if span.parent_span_id == first.span_id]
    names = [span.name for span in children]
    assert {"read_body", "tokenize"} < set(names)
    assert [names.count(name) for name in ("queue", "prefill", "decode")] == [2, 2, 2]
    for child in children:
        assert first.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
        assert child.end_time_unix_nano <= first.end_time_unix_nano and child.trace_id == first.trace_id
    # A request that was refused, in a trace of its own. No attribute has any of what was asked.
    assert refused.status_code == 400 and second.trace_id != first.trace_id
    assert attributes(second)["error.type"] == "invalid_type"
    assert second.status.code == 0  # the client's error, not the server's
    assert "Once upon" not in str(got.spans)


def test_streams_over_grpc(start_server):
    grpc = pytest.importorskip("grpc", reason="pip install 'aiakq[traces]'")
    got = Collector()

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            got.take(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    receiver = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), receiver)
    port = receiver.add_insecure_port("127.0.0.1:0")
    receiver.start()
    with start_server(otlp_traces_endpoint=f"grpc://127.0.0.1:{port}", **FEW) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, trust_env=False) as answer:
            assert answer.headers["traceparent"] and list(answer.iter_lines())[-2] == "data: [DONE]"
        server.stop()  # what is queued is sent before the end
    receiver.stop(0)
    [span] = got.requests(1)
    assert attributes(span)["gen_ai.operation.name"] == "chat" and attributes(span)["gen_ai.request.stream"] is True
    assert len(got.spans) == 1  # no details unless they are asked for


@pytest.mark.parametrize("answers", [False, True], ids=["gone", "silent"])
def test_a_collector_that_is_gone_or_silent_costs_no_request_anything(start_server, answers):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers:  # accepts connections and never answers
            listener.listen(16)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with start_server(otlp_traces_endpoint=url, **FEW) as server:
            body = {"prompt": "Once", "max_tokens": 1}
            with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
                client.post("/v1/completions", json=body)
                time.sleep(1.5)  # until the first spans are on their way
                took = []
                for _ in range(200):
                    began = time.monotonic()
                    assert client.post("/v1/completions", json=body).status_code == 200
                    took.append(time.monotonic() - began)
                assert sorted(took)[-3] < 1.0, "a collector holds up requests"
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < 15


def test_a_full_queue_drops_spans(monkeypatch):
    from aiakq.server.telemetry.request_records import RequestRecord

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        tracer = Tracer(f"http://127.0.0.1:{listener.getsockname()[1]}")
        began = time.monotonic()
        for number in range(5000):
            record = RequestRecord("/v1/completions", str(number), time.monotonic())
            tracer.begin(record)
            record.end("stop", None)
            tracer.finish(record)
        assert time.monotonic() - began < 20
        began = time.monotonic()
        tracer.stop(0.5)
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "endpoint", ["localhost:4317", "ftp://a", "http://", "http://a:b", "collector", "grpc://me:key@a:4317"]
)
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(AiakqError, match="--otlp-traces-endpoint") as caught:
        Tracer(endpoint)
    assert caught.value.id == "bad_option"


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_missing_packages_are_named_with_the_remedy(monkeypatch, scheme):
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(AiakqError, match=r"pip install 'aiakq\[traces\]'") as caught:
        Tracer(f"{scheme}://localhost:4317/v1/traces")
    assert caught.value.id == "traces_missing"


def test_a_server_refuses_what_it_cannot_trace_before_it_loads_the_model(start_server):
    with pytest.raises(AiakqError) as caught:
        start_server(otlp_traces_endpoint="collector:4317")
    assert caught.value.id == "bad_option"
    with pytest.raises(AiakqError) as caught:
        start_server(collect_detailed_traces=["model"])
    assert caught.value.id == "option_conflict"
