"""``aiakq serve`` from the inside: bind, load, answer, drain, end. Nothing here prints; events tell what happens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import prometheus_client

from aiakq.arguments.server import API_KEY_VARIABLE
from aiakq.errors import WORKER, AiakqError, error
from aiakq.runtime.text.output_processor import OutputProcessor
from aiakq.runtime.text.tokenizer import Tokenizer
from aiakq.server.api.app import create_app
from aiakq.server.api.request_manager import GenerationTable, QueueLimits
from aiakq.server.api.service import Service, request_log
from aiakq.server.http.auth import open_paths, read_keys
from aiakq.server.http.http_server import FLUSH_SECONDS, Front, check_tls, start_http
from aiakq.server.http.listener import allow_many_connections, bind, is_loopback, url_of
from aiakq.server.process.ipc import Configured, Ready
from aiakq.server.process.supervisor import Supervisor, phase_event
from aiakq.server.telemetry.events import OnEvent, ServerEvent
from aiakq.server.telemetry.metrics import Metrics

logger = logging.getLogger("aiakq.server")

STATS_SECONDS = 10.0
#: Of equal lines in the log, so many are shown in so many seconds.
LOG_LINES, LOG_SECONDS = 5, 10.0
#: The service, and what the engine said of itself.
Loaded = tuple[Service, Ready]


def serve(args: Mapping[str, Any], on_event: OnEvent) -> int:
    """Serve until a signal ends it; returns the exit code.

    args      as ``aiakq.arguments.server.checked(..., server=True)`` makes them.
    on_event  is called on the event loop with everything worth telling, in order.
    Returns 0 after an orderly end, 130 or 143 when a signal came during loading or a second one cut the drain short,
    and 9 when the engine ended too often. Raises the AiakqError that kept the server from starting: no_key, bad_option,
    option_conflict, port_in_use, engine_start and all that loading a model raises.
    """
    allow_many_connections()
    prometheus_client.disable_created_metrics()
    with _logging_as_events(on_event):
        return asyncio.run(_serve(args, on_event))


async def _serve(args: Mapping[str, Any], on_event: OnEvent) -> int:
    began = time.monotonic()
    keys = read_keys(args, os.environ)
    if not keys and not is_loopback(args["host"]) and not args["allow_no_key"]:
        raise error("no_key", host=args["host"])
    check_tls(args)
    listener = bind(args["host"], args["port"])
    url = url_of(listener, args["host"], tls=bool(args["ssl_certfile"]))
    on_event(ServerEvent("listening", f"Listening on {url}; loading the model.", url=url))
    if not keys and not is_loopback(args["host"]):
        text = f"Everyone who reaches {args['host']} can use this server: it asks for no key."
        on_event(ServerEvent("warning", text))
    front = Front()
    with _Signals() as signals:
        server, server_task = start_http(front, listener, args, keys)
        supervisor = Supervisor(args, on_event)
        await supervisor.start()
        front.progress = lambda: supervisor.progress.as_dict()
        try:
            loading = asyncio.create_task(_load(supervisor, args, on_event))
            if not await signals.before(loading):
                supervisor.engine.kill()
                return 128 + signals.received[0]
            service, ready = _result_or_kill(loading, supervisor)
            engine = asyncio.create_task(supervisor.run(service.table, ready))
            await asyncio.sleep(0)  # the table has the engine now
            front.on_refusal = service.on_refusal
            front.app = create_app(service, bool(keys), open_paths(args))
            # What was made so far lives as long as the process: spare the collector, and the event loop its pauses.
            gc.collect()
            gc.freeze()
            gc.collect()  # how much there is to go through decides how often it does
            seconds = time.monotonic() - began
            on_event(_ready(service, _facts(service, ready), url, bool(keys), seconds, supervisor.engine.pid))
            # The first conversation need not wait for it.
            warming = asyncio.create_task(service.templates.start()) if service.templates.available else None
            try:
                return await _run(service, supervisor, engine, args, signals, server_task, on_event)
            finally:
                engine.cancel()
                if warming is not None:
                    await asyncio.gather(warming, return_exceptions=True)
                    await service.templates.stop()
        finally:
            server.should_exit = True
            await asyncio.gather(supervisor.engine.stop(), server_task, return_exceptions=True)


def _result_or_kill(loading: asyncio.Task[Loaded], supervisor: Supervisor) -> Loaded:
    """What was loaded; a failure ends the engine at once, which may be deep in reading weights."""
    try:
        return loading.result()
    except BaseException:
        supervisor.engine.kill()
        raise


async def _load(supervisor: Supervisor, args: Mapping[str, Any], on_event: OnEvent) -> Loaded:
    """Wait for the engine, prepare the HTTP side meanwhile. Returns the service and what the engine said of itself."""
    configured: asyncio.Future[Configured] = asyncio.get_running_loop().create_future()

    async def load_tokenizer() -> tuple[Configured, Tokenizer]:
        settled = await configured
        began = time.monotonic()
        tokenizer = await asyncio.to_thread(settled.tokenizer.load)
        on_event(phase_event("tokenizer", time.monotonic() - began, tokenizer.describe()))
        return settled, tokenizer

    chat_template = read_chat_template(args["chat_template"])
    tasks = (
        asyncio.create_task(supervisor.load(configured.set_result)),
        asyncio.create_task(load_tokenizer()),
    )
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()
        ready, (settled, tokenizer) = tasks[0].result(), tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()
    names = args["served_model_name"] or [args["model"]]
    metrics = Metrics(names[0], ready.limits.max_model_len, ready.settings)
    queue = QueueLimits(
        batch=ready.max_num_seqs,
        sequences=args["max_num_queued_reqs"],
        tokens=args["max_num_queued_tokens"] or 4 * ready.limits.max_kv_tokens,
        wait_seconds=args["max_queue_seconds"],
        request_seconds=args["max_request_seconds"],
    )
    processor = OutputProcessor(tokenizer, ready.limits)
    service = Service(
        names=names,
        model=args["model"],
        dtype=settled.dtype,
        limits=ready.limits,
        sampling=settled.sampling,
        tokenizer=tokenizer,
        table=GenerationTable(processor, ready.limits, metrics, queue),
        metrics=metrics,
        chat_template=chat_template,
        response_role=args["response_role"],
        max_body_bytes=args["max_body_bytes"],
        progress=lambda: supervisor.progress.as_dict(),
        root_path=args["root_path"],
        admin=args["enable_admin_routes"],
        log_prompts=_logged(args),
    )
    if tokenizer.has_text and not service.templates.available:
        text = "The model has no chat template: chat requests are refused. --chat-template FILE gives it one."
        on_event(ServerEvent("warning", text))
    return service, ready


async def _run(
    service: Service,
    supervisor: Supervisor,
    engine: asyncio.Task[AiakqError],
    args: Mapping[str, Any],
    signals: _Signals,
    server_task: asyncio.Task[None],
    on_event: OnEvent,
) -> int:
    """Answer requests until a signal, then finish what runs; or until there is no engine any more. The exit code."""
    helpers = [asyncio.create_task(_expire(service.table))]
    if not args["disable_log_stats"]:
        helpers.append(asyncio.create_task(_report(service, on_event)))
    try:
        await signals.before(server_task, engine)
        if server_task.done():  # nothing of ours ends it: this raises what did
            server_task.result()
        supervisor.closing = True
        forced = await _drain(service, 0 if engine.done() else args["shutdown_timeout"], signals, on_event)
    finally:
        for helper in helpers:
            helper.cancel()
    if engine.done():
        engine.result()  # a bug in the supervisor shows here
        return WORKER
    return 128 + signals.received[-1] if forced else 0


async def _drain(service: Service, timeout: float, signals: _Signals, on_event: OnEvent) -> bool:
    """Refuse new requests and wait for the running ones; whether a second signal cut it short."""
    service.closing = error("shutting_down")
    running = service.in_flight
    text = f"Shutting down: {running} running requests are finished first, for at most {timeout:g} s."
    on_event(ServerEvent("draining", text if running else "Shutting down."))
    deadline = time.monotonic() + timeout
    while service.in_flight and len(signals.received) < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    forced = service.in_flight > 0 and len(signals.received) > 1
    cut = service.in_flight
    service.table.fail_all(service.closing)
    deadline = time.monotonic() + FLUSH_SECONDS
    while service.in_flight and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    text = f"Stopped; {cut} requests were cut short." if cut else "Stopped."
    on_event(ServerEvent("stopped", text))
    return forced


async def _expire(table: GenerationTable) -> None:
    """Look twice per second for requests that have waited or run for too long."""
    while True:
        await asyncio.sleep(0.5)
        table.expire(time.monotonic())


async def _report(service: Service, on_event: OnEvent) -> None:
    """One line of statistics every ten seconds in which something was generated."""
    table = service.table
    while True:
        before = (table.prompt_tokens, table.generation_tokens, table.stats.prefix_queries, table.stats.prefix_hits)
        await asyncio.sleep(STATS_SECONDS)
        after = (table.prompt_tokens, table.generation_tokens, table.stats.prefix_queries, table.stats.prefix_hits)
        prompt, output, queries, hits = (new - old for new, old in zip(after, before, strict=True))
        stats = table.stats
        if not (prompt or output or service.in_flight):
            continue
        text = (
            f"running {stats.num_running}, waiting {stats.num_waiting}, "
            f"prompt {prompt / STATS_SECONDS:.1f} tokens/s, output {output / STATS_SECONDS:.1f} tokens/s, "
            f"KV pages {stats.kv_usage:.1%} used, prefix cache {hits / queries if queries else 0.0:.1%} hits"
        )
        on_event(ServerEvent("stats", text))


class _Signals:
    """INT and TERM, collected instead of acted on."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._first = asyncio.Event()

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, int(number))
        return self

    def __exit__(self, *ignored: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    async def before(self, *tasks: asyncio.Task[Any]) -> bool:
        """Wait for one of ``tasks`` or the first signal; whether a task was first."""
        first = asyncio.create_task(self._first.wait())
        await asyncio.wait({*tasks, first}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        return any(task.done() for task in tasks)

    def _on_signal(self, number: int) -> None:
        self.received.append(number)
        self._first.set()


def _logged(args: Mapping[str, Any]) -> float | None:
    """How much of prompts is logged, see ``Service``; from then on lines about requests are shown."""
    if not args["enable_log_requests"]:
        return None
    request_log.setLevel(logging.INFO)
    return math.inf if args["max_log_len"] is None else args["max_log_len"]


def read_chat_template(given: str | None) -> str | None:
    """The template of --chat-template: the content of a file, or the text itself. Raises ``bad_option``."""
    if given is None:
        return None
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError):
        expected = "a readable file or a template (which would hold a brace)"
        hint = "Give the path of a Jinja file."
        raise error("bad_option", option="--chat-template", value=given, expected=expected, hint=hint) from None


def _facts(service: Service, ready: Ready) -> dict[str, str]:
    """What the start-up table shows beside the phases."""
    if not service.sampling:
        return dict(ready.facts)
    values = ", ".join(f"{name} {value}" for name, value in service.sampling.items())
    return {**ready.facts, "default sampling": values}


def _ready(
    service: Service, facts: dict[str, str], url: str, asks_for_key: bool, seconds: float, engine_pid: int
) -> ServerEvent:
    body = json.dumps({"model": service.names[0], "prompt": "Once upon a time", "max_tokens": 16})
    key = f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"' if asks_for_key else ""
    curl = f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
    return ServerEvent(
        "ready",
        f"Ready after {seconds:.1f} s: {url}",
        seconds=seconds,
        url=url,
        curl=curl,
        facts=facts,
        engine_pid=engine_pid,
    )


class _EventHandler(logging.Handler):
    """Turns log records into events, a few of each kind per ten seconds: clients can cause any number of some.

    Lines about every request are not held back; whoever does not want them does not ask for them.
    """

    def __init__(self, on_event: OnEvent) -> None:
        super().__init__()
        self._on_event = on_event
        self._since = 0.0
        self._seen: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now - self._since > LOG_SECONDS:
            self._since = now
            left_out = sum(max(0, count - LOG_LINES) for count in self._seen.values())
            self._seen.clear()
            if left_out:
                self._on_event(ServerEvent("log", f"{left_out} more lines like these were left out.", detail="warning"))
        kind = (record.name, str(record.msg)[:64])
        self._seen[kind] += 1
        if self._seen[kind] <= LOG_LINES or record.name in ("uvicorn.access", request_log.name):
            self._on_event(ServerEvent("log", self.format(record), name=record.name, detail=record.levelname.lower()))


@contextlib.contextmanager
def _logging_as_events(on_event: OnEvent) -> Iterator[None]:
    """While it lasts, the logs of the HTTP server and our own go to ``on_event`` and nowhere else."""
    handler = _EventHandler(on_event)
    loggers = [logging.getLogger(name) for name in ("uvicorn", "aiakq")]
    before = [one.propagate for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.propagate = False
    try:
        yield
    finally:
        for one, propagate in zip(loggers, before, strict=True):
            one.removeHandler(handler)
            one.propagate = propagate
