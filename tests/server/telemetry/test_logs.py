"""Log lines and statistics of a server."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
import warnings

import httpx
import pytest

from aiakq.errors import AiakqError
from aiakq.runtime.text.output_processor import Delta
from aiakq.server.periodic import STATS_SECONDS
from aiakq.server.telemetry.logs import (
    EventLogHandler,
    OutputLog,
    WithoutPaths,
    configure_logging,
    logging_as_events,
    request_logger,
)


@pytest.fixture(scope="module")
def silent(start_server):
    """A server without statistics and without lines for requests."""
    options = {"disable_log_stats": True, "uvicorn_log_level": "info", "disable_uvicorn_access_log": True}
    with start_server(**options, num_gpu_blocks_override=65) as running:
        yield running


def test_the_http_log_has_the_configured_level_and_can_be_disabled(start_server, server, silent):
    with start_server(uvicorn_log_level="info", num_gpu_blocks_override=65) as loud:
        for one in (silent, server, loud):
            assert httpx.get(f"{one.url}/version", trust_env=False).status_code == 200

        def heard(one) -> bool:
            return any("GET /version" in event.message for event in one.events)

        deadline = time.monotonic() + 20
        while not heard(loud) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert heard(loud) and not heard(server) and not heard(silent)


def test_the_statistics_log_can_be_disabled(server, silent):
    began, before = time.monotonic(), len(server.events)

    def has_stats(events) -> bool:
        return any(event.kind == "stats" for event in events)

    deadline = began + 60
    while not (has_stats(server.events[before:]) and time.monotonic() > began + STATS_SECONDS + 1):
        assert time.monotonic() < deadline
        for one in (silent, server):
            body = {"prompt": "Once", "max_tokens": 2}
            assert httpx.post(f"{one.url}/v1/completions", json=body, trust_env=False).status_code == 200
        time.sleep(0.3)
    assert not has_stats(silent.events)


def test_repeated_log_messages_are_limited():
    events = []
    handler = EventLogHandler(events.append)
    logger = logging.Logger("flood")
    logger.addHandler(handler)
    for number in range(1000):
        logger.warning("request %d failed", number)
        logger.error("another kind")
    assert len(events) == 10
    handler._window_start -= 100
    logger.error("later")
    assert "1990 more lines" in events[-2].message and events[-1].message == "later"


def test_warnings_are_events_of_one_line():
    events = []
    with logging_as_events(events.append):
        warnings.warn("old\nnews", DeprecationWarning, stacklevel=1)
        logging.getLogger("py.warnings").warning("%s", "a.py:1: UserWarning: new\n  code()\n")
    assert [event.message.count("\n") for event in events] == [0, 0]
    assert "DeprecationWarning: old" in events[0].message and events[0].detail == "warning"


def test_the_log_is_one_json_object_per_line(example_model, tmp_path):
    log = tmp_path / "log"
    key = tmp_path / "key"
    key.write_text("secret\n")
    socket = tmp_path / "s"
    words = ["serve", str(example_model), "--uds", str(socket), "--num-gpu-blocks-override", "65", "--dtype", "float32"]
    command = [sys.executable, "-m", "aiakq", *words, "--log-format", "json", "--api-key-file", str(key)]
    command += ["--root-path", "/models"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    try:
        transport = httpx.HTTPTransport(uds=str(socket))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            deadline = time.monotonic() + 120
            while b'"event":"ready"' not in log.read_bytes():
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)
            headers = {"authorization": "Bearer secret", "x-request-id": "order-17"}
            body = {"prompt": "A secret plan", "max_tokens": 3, "ignore_eos": True}
            endless = body | {"stream": True, "max_tokens": 900}
            answer = client.post("/v1/completions", json=body, headers=headers)
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers) as stream:
                stream.read()
            client.post("/v1/completions", json=body | {"n": 999}, headers=headers | {"x-request-id": "a b"})
            client.post("/v1/completions", json=body)
            with client.stream("POST", "/v1/completions", json=endless, headers=headers):
                pass
            usage = answer.json()["usage"]
            while log.read_bytes().count(b'"event":"request"') < 5:
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for row in rows:
        assert {"time", "level", "event", "message"} <= row.keys() and row["time"].endswith("Z")
    assert [row["event"] for row in rows if row["event"] in ("listening", "ready", "draining", "stopped")] == [
        *("listening", "ready", "draining", "stopped")
    ]
    plain, streamed, refused, keyless, abandoned = (row for row in rows if row["event"] == "request")
    assert plain["request_id"] == answer.headers["x-request-id"] != plain["client_request_id"] == "order-17"
    assert (plain["status"], plain["reason"], plain["route"]) == (200, "length", "/v1/completions")
    assert (plain["prompt_tokens"], plain["output_tokens"]) == (usage["prompt_tokens"], 3)
    assert 0 <= plain["queue_ms"] <= plain["first_token_ms"] <= plain["total_ms"] < 60_000
    assert len(plain["key"]) == 8 and "secret" not in log.read_text()
    assert streamed["streamed"] and streamed["output_tokens"] == 3
    assert (refused["status"], refused["error"], refused["reason"]) == (400, "value_out_of_range", "error")
    assert "client_request_id" not in refused
    assert (keyless["status"], keyless["error"]) == (401, "invalid_api_key") and "key" not in keyless
    assert abandoned["reason"] == "abort" and abandoned["status"] == 200


def test_a_failure_to_start_is_a_line_of_json_too(tmp_path):
    command = [sys.executable, "-m", "aiakq", "serve", str(tmp_path), "--port", "0", "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    last = json.loads(done.stderr.splitlines()[-1])
    assert done.returncode not in (0, 1) and last["level"] == "error" and last["event"] == "failed"
    assert last["error"] and last["remedy"]


def requests_of(server, count: int) -> list[dict]:
    """The lines about finished requests, once there are so many."""
    deadline = time.monotonic() + 20
    while len(found := [event.values for event in server.events if event.kind == "request"]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_every_api_that_generates_has_its_line(start_server):
    messages = [{"role": "user", "content": "Hi"}]
    bodies = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 2, "n": 2},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 2, "store": False},
        "/v1/messages": {"model": "tinybooks", "messages": messages, "max_tokens": 2},
        "/v1/completions": {"prompt": ["Once upon a time " * 20] * 2, "max_tokens": 2, "best_of": 2, "n": 1},
    }
    with start_server(log_format="json", root_path="/llm") as server:
        for path, body in bodies.items():
            assert httpx.post(f"{server.url}/llm{path}", json=body, trust_env=False).status_code == 200
        httpx.get(f"{server.url}/v1/models", trust_env=False)
        found = requests_of(server, 4)
        usage = httpx.post(f"{server.url}/v1/completions", json=bodies["/v1/completions"], trust_env=False).json()[
            "usage"
        ]
        cached = requests_of(server, 5)[-1]
    assert [line["route"] for line in found] == list(bodies)
    assert {line["model"] for line in found} == {"tinybooks"} and {line["status"] for line in found} == {200}
    assert [line["output_tokens"] for line in found[:3]] == [4, 2, 2]
    assert cached["prompt_tokens"] == usage["prompt_tokens"], "a prompt counts once, however many texts continue it"
    assert cached["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_embeddings_have_their_line(start_server):
    with start_server(log_format="json", task="embed") as server:
        body = {"input": ["one", "two words"]}
        answer = httpx.post(f"{server.url}/v1/embeddings", json=body, trust_env=False).json()
        [line] = requests_of(server, 1)
    assert (line["route"], line["reason"], line["status"]) == ("/v1/embeddings", "stop", 200)
    assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"] and line["output_tokens"] == 0


def test_an_output_is_logged_when_it_ends(caplog):
    log = OutputLog("cmpl-1")
    with caplog.at_level(logging.INFO, request_logger.name):
        log.put(0, Delta("r", 0, "lost", [1], None, 0.0))
        log.clear()
        log.put(0, Delta("r", 0, "one", [1], None, 0.0))
        log.put(0, Delta("r", 1, "other", [1], None, 0.0))
        log.put(0, Delta("r", 0, " two", [2], None, 0.0, "stop"))
    assert caplog.messages == ["request cmpl-1: output 0.0 'one two', finish_reason stop"]


def test_the_access_log_leaves_out_paths():
    kept = WithoutPaths(["/health"])

    def is_kept(path: str) -> bool:
        line = ("127.0.0.1:1", "GET", path, "1.1", 200)
        return kept.filter(logging.LogRecord("uvicorn.access", logging.INFO, "f", 1, "%s", line, None))

    assert [is_kept(path) for path in ("/health", "/health?x=1", "/healthz", "/v1/models")] == [
        False, False, True, True,
    ]  # fmt: skip


def test_a_logging_configuration_is_applied_or_refused(tmp_path):
    file, target = tmp_path / "logging.json", tmp_path / "requests.log"
    handlers = {"to_file": {"class": "logging.FileHandler", "filename": str(target)}}
    loggers = {"aiakq.test_config": {"handlers": ["to_file"], "level": "INFO"}}
    file.write_text(json.dumps({"version": 1, "handlers": handlers, "loggers": loggers}))
    configure_logging(str(file))
    logging.getLogger("aiakq.test_config").info("hello")
    assert target.read_text() == "hello\n"
    for text in ("{", "[]", '{"version": 2}', '{"version": 1, "handlers": {"x": {"class": "no.Such"}}}'):
        file.write_text(text)
        with pytest.raises(AiakqError, match="--log-config-file is .*logging.json"):
            configure_logging(str(file))
