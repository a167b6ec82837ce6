"""``aiakq serve`` from the inside: bind, load, answer, drain, end. Nothing here prints; events tell what happens."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import shlex
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import prometheus_client
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from aiakq.errors import WORKER, AiakqError, error
from aiakq.runtime.output_processor import OutputProcessor
from aiakq.runtime.server.app import create_app
from aiakq.runtime.server.engine_client import EngineClient
from aiakq.runtime.server.events import OnEvent, ServerEvent
from aiakq.runtime.server.generation import GenerationTable
from aiakq.runtime.server.listener import BACKLOG, allow_many_connections, bind, is_loopback, url_of
from aiakq.runtime.server.metrics import Metrics
from aiakq.runtime.server.service import Service, request_log
from aiakq.runtime.server.streaming import error_answer
from aiakq.runtime.server.wire import Configured, Loading
from aiakq.runtime.tokenizer import Tokenizer

logger = logging.getLogger("aiakq.server")

STATS_SECONDS = 10.0
#: Seconds that answers already written get to leave the machine.
FLUSH_SECONDS = 2
#: The service and the facts of the start-up table.
Loaded = tuple[Service, dict[str, str]]


def serve(args: Mapping[str, Any], on_event: OnEvent) -> int:
    """Serve until a signal ends it; returns the exit code.

    args      as ``aiakq.runtime.args.checked(..., server=True)`` makes them.
    on_event  is called on the event loop with everything worth telling, in order.
    Returns 0 after an orderly end, 130 or 143 when a signal came during loading or a second one cut the drain short,
    and 9 when the engine had died. Raises the AiakqError that kept the server from starting: port_in_use, bad_option,
    engine_start and all that loading a model raises.
    """
    allow_many_connections()
    prometheus_client.disable_created_metrics()
    with _logging_as_events(on_event):
        return asyncio.run(_serve(args, on_event))


async def _serve(args: Mapping[str, Any], on_event: OnEvent) -> int:
    began = time.monotonic()
    listener = bind(args["host"], args["port"])
    url = url_of(listener, args["host"])
    on_event(ServerEvent("listening", f"Listening on {url}; loading the model.", url=url))
    if not is_loopback(args["host"]):
        text = f"Everyone who reaches {args['host']} can use this server: it asks for no key."
        on_event(ServerEvent("warning", text))
    front = Front()
    with _Signals() as signals:
        server, server_task = _start_http(front, listener, args)
        engine = await EngineClient.start(args)
        try:
            loading = asyncio.create_task(_load(engine, args, on_event))
            if not await signals.before(loading):
                engine.kill()
                return 128 + signals.received[0]
            service, facts = _result_or_kill(loading, engine)
            front.app = create_app(service)
            # What was made so far lives as long as the process: spare the collector, and the event loop its pauses.
            gc.collect()
            gc.freeze()
            on_event(_ready(service, facts, url, time.monotonic() - began, engine.pid))
            return await _run(service, engine, args, signals, server_task, on_event)
        finally:
            server.should_exit = True
            await asyncio.gather(engine.stop(), server_task, return_exceptions=True)


def _result_or_kill(loading: asyncio.Task[Loaded], engine: EngineClient) -> Loaded:
    """What was loaded; a failure ends the engine at once, which may be deep in reading weights."""
    try:
        return loading.result()
    except BaseException:
        engine.kill()
        raise


async def _load(engine: EngineClient, args: Mapping[str, Any], on_event: OnEvent) -> Loaded:
    """Wait for the engine, prepare the HTTP side meanwhile. Returns the service and the facts of the start-up table."""
    configured: asyncio.Future[Configured] = asyncio.get_running_loop().create_future()

    def on_phase(phase: Loading) -> None:
        on_event(_phase(phase.name, phase.seconds, phase.detail))

    async def load_tokenizer() -> tuple[Configured, Tokenizer]:
        settled = await configured
        began = time.monotonic()
        tokenizer = await asyncio.to_thread(settled.tokenizer.load)
        on_event(_phase("tokenizer", time.monotonic() - began, tokenizer.describe()))
        return settled, tokenizer

    chat_template = read_chat_template(args["chat_template"])
    tasks = (
        asyncio.create_task(engine.load(configured.set_result, on_phase)),
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
    processor = OutputProcessor(tokenizer, ready.limits)
    service = Service(
        names=names,
        model=args["model"],
        dtype=settled.dtype,
        limits=ready.limits,
        sampling=settled.sampling,
        tokenizer=tokenizer,
        table=GenerationTable(engine, processor, ready.limits, metrics, args["max_num_queued_reqs"]),
        metrics=metrics,
        chat_template=chat_template,
        response_role=args["response_role"],
        root_path=args["root_path"],
        admin=args["enable_admin_routes"],
        log_prompts=_logged(args),
    )
    if chat_template is None and tokenizer.has_text and not tokenizer.has_chat_template:
        text = "The model has no chat template: chat requests are refused. --chat-template FILE gives it one."
        on_event(ServerEvent("warning", text))
    facts = dict(ready.facts)
    if settled.sampling:
        facts["default sampling"] = ", ".join(f"{name} {value}" for name, value in settled.sampling.items())
    return service, facts


async def _run(
    service: Service,
    engine: EngineClient,
    args: Mapping[str, Any],
    signals: _Signals,
    server_task: asyncio.Task[None],
    on_event: OnEvent,
) -> int:
    """Answer requests until a signal, then finish what runs; the exit code."""
    helpers = [asyncio.create_task(_follow(engine, service.table, on_event))]
    if not args["disable_log_stats"]:
        helpers.append(asyncio.create_task(_report(service, on_event)))
    try:
        await signals.before(server_task)
        if server_task.done():  # nothing of ours ends it: this raises what did
            server_task.result()
        forced = await _drain(service, args["shutdown_timeout"], signals, on_event)
    finally:
        for helper in helpers:
            helper.cancel()
    if service.table.failure is not None:
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


async def _follow(engine: EngineClient, table: GenerationTable, on_event: OnEvent) -> None:
    """Pass on what the engine says until it ends; then every request is refused."""
    try:
        async for output in engine.steps():
            table.on_step(output)
    except Exception as failure:
        if not isinstance(failure, AiakqError):
            logger.exception("following the engine failed")
            engine.kill()
            failure = error("engine_dead", reason="its messages could not be read")
        table.on_engine_end(failure)
        on_event(ServerEvent("engine_dead", str(failure)))


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
        used = 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0
        text = (
            f"running {stats.num_running}, waiting {stats.num_waiting}, "
            f"prompt {prompt / STATS_SECONDS:.1f} tokens/s, output {output / STATS_SECONDS:.1f} tokens/s, "
            f"KV pages {used:.1%} used, prefix cache {hits / queries if queries else 0.0:.1%} hits"
        )
        on_event(ServerEvent("stats", text))


class Front:
    """The ASGI application from the first moment on: says that the model is loading until ``app`` is there."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app or error_answer(error("loading"))
        await app(scope, receive, send)


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: a signal must not close the door before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _start_http(
    front: Front, listener: socket.socket, args: Mapping[str, Any]
) -> tuple[_HttpServer, asyncio.Task[None]]:
    level = args["uvicorn_log_level"]
    config = uvicorn.Config(
        front,
        http="h11",  # refuses header floods, which the faster parser lets through
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=level,
        access_log=level in ("info", "debug"),
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=FLUSH_SECONDS,
        backlog=BACKLOG,
    )
    server = _HttpServer(config)
    return server, asyncio.create_task(server.serve(sockets=[listener]))


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

    async def before(self, task: asyncio.Task[Any]) -> bool:
        """Wait for ``task`` or the first signal; whether the task was first."""
        first = asyncio.create_task(self._first.wait())
        await asyncio.wait({task, first}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        return task.done()

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


def _phase(name: str, seconds: float, detail: str) -> ServerEvent:
    return ServerEvent("phase", f"{name}: {seconds:.1f} s, {detail}", name=name, seconds=seconds, detail=detail)


def _ready(service: Service, facts: dict[str, str], url: str, seconds: float, engine_pid: int) -> ServerEvent:
    body = json.dumps({"model": service.names[0], "prompt": "Once upon a time", "max_tokens": 16})
    curl = f"curl {url}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
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
    """Turns log records into events."""

    def __init__(self, on_event: OnEvent) -> None:
        super().__init__()
        self._on_event = on_event

    def emit(self, record: logging.LogRecord) -> None:
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
