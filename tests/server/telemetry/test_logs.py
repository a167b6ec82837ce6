"""Log lines and statistics of a server."""

from __future__ import annotations

import logging
import time

import httpx

from aiakq.server.telemetry.logs import EventLogHandler


def test_the_http_log_has_the_configured_level(start_server, server):
    with start_server(uvicorn_log_level="info", num_gpu_blocks_override=65) as loud:
        for one in (loud, server):
            assert httpx.get(f"{one.url}/version", trust_env=False).status_code == 200

        def heard(one) -> bool:
            return any("GET /version" in event.message for event in one.events)

        deadline = time.monotonic() + 20
        while not heard(loud) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert heard(loud) and not heard(server)


def test_the_statistics_log_can_be_disabled(start_server):
    few = {"num_gpu_blocks_override": 65}
    with start_server(**few) as talking, start_server(disable_log_stats=True, **few) as silent:

        def told(one) -> bool:
            return any(event.kind == "stats" for event in one.events)

        deadline = time.monotonic() + 60
        while not told(talking) and time.monotonic() < deadline:
            for one in (silent, talking):
                body = {"prompt": "Once", "max_tokens": 2}
                assert httpx.post(f"{one.url}/v1/completions", json=body, trust_env=False).status_code == 200
            time.sleep(0.3)
        time.sleep(1)  # the silent one was ready earlier or at most a moment later
        assert told(talking) and not told(silent)


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
